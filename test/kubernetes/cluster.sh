#!/usr/bin/env bash
# A real Kubernetes on this machine, of one node or of several, in namespaces of their own:
#
#   cluster.sh up                starts it; what runs is left running
#   cluster.sh down              ends every process of it and removes all that it made
#   cluster.sh exec CMD          runs CMD on the first node, which is called node
#   cluster.sh on NODE CMD       runs CMD on another: node-2, node-3, ...
#   cluster.sh reboot [NODE]     ends every process of the node, keeps its disk, starts it again
#   cluster.sh halt NODE         ends every process of the node, keeps its disk
#   cluster.sh start NODE        starts a node that was halted, or a new one with an empty disk
#   cluster.sh rename NODE NEW   the node was halted; it has another name from now on
#   cluster.sh reinstall NODE    the node was halted; of its disk, only its pool is left
#   cluster.sh remove NODE       ends the node for good: its disk is gone
#
# CRUST_KUBERNETES_NODES is how many nodes "up" starts; nine are possible. The first is the control plane too.
# CRUST_KUBERNETES_OCI is the OCI runtime, runc or crun; CRUST_KUBERNETES_BIN has other programs: versions/run.sh.
# CRUST_KUBERNETES_GATES are feature gates of Kubernetes, as NAME=true,...: health/
# A node is a process tree with its own pid, mount and network namespaces. Its
# root is this machine's, with all changes on a disk of its own (a file). So
# everything is where it is on any node, and ends with the node's PID 1. Each node but the first
# has a cable to the first, which forwards.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
S=${CRUST_KUBERNETES_STATE:-$project/.cache/kubernetes/node}
bin=${CRUST_KUBERNETES_BIN:-$project/.cache/kubernetes/bin} # the programs that a node runs
images=${CRUST_KUBERNETES_IMAGES:-$project/.cache/image}
patience=${CRUST_KUBERNETES_PATIENCE:-3} # a factor, for slow and for busy machines
most=9
export PATH=$PATH:/usr/sbin:/sbin
die() { echo "cluster: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root"

# home prints where a node's disk, process and logs are.
home() { [ "$1" = node ] && echo "$S" || echo "$S/nodes/$1"; }
number() { [ "$1" = node ] && echo 1 || echo "${1#node-}"; }
known() { [[ $1 == node || $1 =~ ^node-[2-$most]$ ]] || die "$1: nodes are called node, node-2, ... node-$most"; }
# all prints the nodes that have a disk.
all() {
	local d
	[ ! -e "$S/disk" ] || echo node
	for d in "$S"/nodes/*/; do [ ! -d "$d" ] || basename "$d"; done
}
cgroup() { echo "crust-kubernetes-$(home "$1" | sha256sum | head -c 8)"; }
starttime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
# pid prints a node's PID 1, as this machine sees it.
pid() {
	local p at
	read -r p at 2>/dev/null <"$(home "$1")/pid" || return 1
	[ -n "$at" ] && [ "$(starttime "$p")" = "$at" ] && echo "$p"
}
on_node() { # node command...
	local p name=$1
	shift
	p=$(pid "$name") || die "$name does not run: cluster.sh up"
	nsenter -t "$p" -m -p -n -u -- env "PATH=$bin:$PATH" KUBECONFIG=/etc/kubernetes/admin.kubeconfig "$@"
}
cgroups() { awk '{for (i = 7; i <= NF; i++) if ($i == "-") { if ($(i+1) ~ /^cgroup2?$/) print $5; break }}' /proc/self/mountinfo; }

keys() {
	local k=$S/pki a n w
	[ ! -e "$k/done" ] || return 0
	rm -rf "$k"
	mkdir -p "$k"
	(
		cd "$k"
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=crust-test-ca -keyout ca.key -out ca.crt
		openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kube-apiserver -keyout api.key -out api.csr
		echo 'subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:192.0.2.1,DNS:localhost,DNS:kubernetes.default.svc' >san
		openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile san -out api.crt
		openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out sa.key
		openssl pkey -in sa.key -pubout -out sa.pub
		for n in admin node $(seq -f node-%g 2 $most); do
			a=$(openssl rand -hex 16)
			w=$a,system:node:$n,$n,'"system:nodes"'
			[ "$n" != admin ] || w=$a,admin,admin,'"system:masters"'
			echo "$w" >>tokens
			cat >"$n.kubeconfig" <<-K
				apiVersion: v1
				kind: Config
				current-context: test
				contexts: [{name: test, context: {cluster: test, user: test}}]
				clusters: [{name: test, cluster: {server: "https://192.0.2.1:443", certificate-authority-data: $(base64 -w0 ca.crt)}}]
				users: [{name: test, user: {token: $a}}]
			K
		done
		touch done
	) 2>"$S/log/pki.log"
}

try() { # node seconds what command...
	local name=$1 end=$((SECONDS + $2 * patience)) what=$3
	shift 3
	until ("$@") >/dev/null 2>&1; do
		[ $SECONDS -lt "$end" ] || die "$what: not within its time; see $(home "$name")/log"
		pid "$name" >/dev/null || die "$name ended; see $(home "$name")/log/node.log"
		sleep 0.3
	done
}

# boot starts a node's PID 1.
boot() {
	local name=$1 f p child= h cg i
	h=$(home "$name") cg=$(cgroup "$name") i=$(number "$name")
	! pid "$name" >/dev/null || return 0
	[ -x "$bin/hyper" ] || die "build it first: test/kubernetes/build.sh"
	mkdir -p "$h/log"
	if [ ! -e "$h/disk" ]; then
		truncate -s 40G "$h/disk.new"
		mkfs.xfs -q "$h/disk.new" # shares extents: snapshots take no time
		mv "$h/disk.new" "$h/disk"
	fi
	cgroups | while read -r f; do
		mkdir -p "$f/$cg"
		[ ! -e "$f/cgroup.controllers" ] || for p in $(cat "$f/cgroup.controllers"); do echo "+$p" >"$f/cgroup.subtree_control" || true; done
	done
	rm -f "$h/api.sock" "$h/ready"
	setsid unshare --mount --pid --net --uts --fork --kill-child --propagation slave \
		"$here/node.sh" "$name" "$i" "$h" "$S/pki" "$bin" "$images" "$cg" </dev/null >>"$h/log/node.log" 2>&1 &
	p=$!
	# Only what unshare has forked: before it, that process is a shell, which may have children of its own.
	for f in $(seq 600); do
		[ "$(cat "/proc/$p/comm" 2>/dev/null)" = unshare ] && child=$(cat "/proc/$p/task/$p/children" 2>/dev/null) && [ -n "$child" ] && break
		kill -0 "$p" 2>/dev/null || break
		sleep 0.05
	done
	child=${child%% *}
	[ -n "$child" ] || die "$name did not start; see $h/log/node.log"
	# On a busy machine, a kubelet or an API server that gets no processor for ten seconds is lost. The scheduler groups processes by
	# session, so this goes before the tests; pods have cgroups of their own. A kernel may not group, or a container may forbid it.
	{ echo -10 >"/proc/$child/autogroup"; } 2>/dev/null || true
	echo "$child $(starttime "$child")" >"$h/pid"
}

# wire gives a node its cable to the first.
wire() {
	local first other n
	[ "$1" != node ] && first=$(pid node) && other=$(pid "$1") || return 0
	n=$(number "$1")
	first() { nsenter -t "$first" -n -- "$@"; }
	other() { nsenter -t "$other" -n -- "$@"; }
	! first ip link show "n$n" >/dev/null 2>&1 || ! other ip link show eth0 >/dev/null 2>&1 || return 0
	first ip link del "n$n" 2>/dev/null || true
	first ip link add "n$n" type veth peer name eth0 netns "$other"
	first ip link set "n$n" up
	other ip link set lo up
	other ip address replace "192.0.2.$n/32" dev lo
	other ip link set eth0 up
	other ip route replace 192.0.2.1/32 dev eth0 src "192.0.2.$n"
	other ip route replace default via 192.0.2.1 src "192.0.2.$n"
	first ip route replace "192.0.2.$n/32" dev "n$n"
	first ip route replace "10.244.$n.0/24" via "192.0.2.$n"
}

# joined waits until nodes are Ready.
joined() {
	local name
	for name; do
		try "$name" 90 "the kubelet of $name" on_node node kubectl get --request-timeout=20s node "$name"
		try "$name" 240 "the container images of $name" test -e "$(home "$name")/ready"
	done
	on_node node kubectl wait --for=condition=Ready "${@/#/node/}" --timeout=$((90 * patience))s >/dev/null
}

up() {
	local f t=$SECONDS nodes name
	nodes=("node" $(seq -f node-%g 2 "${CRUST_KUBERNETES_NODES:-1}") $(all))
	readarray -t nodes < <(printf '%s\n' "${nodes[@]}" | sort -u)
	mkdir -p "$S/log"
	keys
	# The kubelet overwrites these, and they are this machine's.
	if [ ! -e "$S/sysctl" ]; then
		for f in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
			[ ! -r "/proc/sys/$f" ] || echo "$f $(cat "/proc/sys/$f")"
		done >"$S/sysctl.new"
		mv "$S/sysctl.new" "$S/sysctl"
	fi
	for name in "${nodes[@]}"; do boot "$name"; done
	for name in "${nodes[@]}"; do wire "$name"; done
	try node 180 "API server" on_node node kubectl get --request-timeout=20s --raw /readyz
	joined "${nodes[@]}"
	try node 60 "default service account" on_node node kubectl get --request-timeout=20s serviceaccount default
	echo "cluster: ${#nodes[@]} up after $((SECONDS - t)) s; $here/cluster.sh exec kubectl get pods -A"
}

# loops prints the loop devices that a node made: over files of its disk, and,
# first, over those (the kubelet locks raw block volumes so).
loops() {
	local disk all name ino
	disk=$(losetup -n -O NAME -j "$(home "$1")/disk" | head -1)
	[ -n "$disk" ] || return 0
	# The kernel may be taking them away just now.
	disk=$(lsblk -dno MAJ:MIN "$disk" | tr -d ' ') || return 0
	all=$(losetup -n -l -O NAME,BACK-MAJ:MIN,BACK-INO) || return 0
	echo "$all" | awk -v d="$disk" '$2 == d { print $1 }' | while read -r name; do
		ino=$(stat -c %i "$name") || continue
		echo "$all" | awk -v i="$ino" -v me="$name" '$3 == i && $1 != me { print $1 }'
		echo "$name"
	done
}

halt() {
	local p n m h
	h=$(home "$1")
	if p=$(pid "$1"); then
		kill -KILL "$p"
		for n in $(seq 100); do pid "$1" >/dev/null || break; sleep 0.1; done
	fi
	rm -f "$h/pid"
	# Cgroups outlive their processes; a kubelet that finds those of dead containers
	# takes a minute to start.
	cgroups | while read -r m; do
		[ ! -d "$m/$(cgroup "$1")" ] || find "$m/$(cgroup "$1")" -mindepth 1 -depth -type d -exec rmdir {} + 2>/dev/null || true
	done
	# So do loop devices, which would end with a machine; and the kernel's clean-up of namespaces takes a little.
	for n in $(seq 100); do
		loops "$1" | while read -r p; do losetup -d "$p" 2>/dev/null || true; done
		[ -n "$(losetup -n -O NAME -j "$h/disk" 2>/dev/null)" ] || break
		sleep 0.1
	done
}

# earlier rewrites this boot's id in the node's records, so that they look like an
# earlier boot's. (The kernel's cannot be changed.)
earlier() {
	local m id
	[ -e "$(home "$1")/disk" ] || return 0
	m=$(mktemp -d)
	id=$(cat /proc/sys/kernel/random/boot_id)
	mount -o loop "$(home "$1")/disk" "$m"
	{ grep -rlF "$id" "$m"/upper/var/lib/csi-node "$m"/upper/var/lib/crust "$m"/upper/var/lib/crust-agent 2>/dev/null || true; } |
		while read -r f; do sed -i "s/$id/00000000-0000-0000-0000-000000000000/" "$f"; done
	umount "$m"
	rmdir "$m"
}

# reinstall keeps only a node's pool.
reinstall() {
	local m
	m=$(mktemp -d)
	mount -o loop "$(home "$1")/disk" "$m"
	find "$m" -mindepth 1 -maxdepth 1 ! -name crust-csi -exec rm -rf {} +
	umount "$m"
	rmdir "$m"
}

# gone ends a node and removes what was its.
gone() {
	local f
	halt "$1"
	cgroups | while read -r f; do [ ! -d "$f/$(cgroup "$1")" ] || rmdir "$f/$(cgroup "$1")" || true; done
}

down() {
	local f v left name
	[ -d "$S" ] || { echo "cluster: nothing at $S"; return; }
	for name in $(all | sort -r); do gone "$name"; done
	[ ! -e "$S/sysctl" ] || while read -r f v; do echo "$v" >"/proc/sys/$f"; done <"$S/sysctl"
	left=$(losetup -l -n -O NAME,BACK-FILE | grep -F "$S/" || true)
	[ -z "$left" ] || die "still there: $left"
	find "$S" -mindepth 1 -maxdepth 1 ! -name log ! -name nodes -exec rm -rf {} +
	for name in "$S"/nodes/*/; do [ ! -d "$name" ] || find "$name" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf {} +; done
	echo "cluster: down"
}

start() {
	boot "$1"
	wire "$1"
	joined "$1"
}

main() {
	local verb=${1:-}
	[ $# = 0 ] || shift
	case $verb in
	keys) mkdir -p "$S/log" && keys ;; # for a node that has no openssl
	up) up ;;
	down) down ;;
	# kubectl, which starts thousands of times, spends a third of its processor time on garbage that it need not collect.
	exec) GOGC=400 on_node node "$@" ;;
	on) known "$1" && GOGC=400 on_node "$@" ;;
	reboot)
		set -- "${1:-node}"
		known "$1"
		halt "$1"
		earlier "$1"
		if [ "$1" = node ]; then up; else start "$1"; fi
		;;
	halt) known "$1" && halt "$1" ;;
	start)
		known "$1"
		earlier "$1"
		start "$1"
		;;
	rename)
		known "$1" && known "$2"
		! pid "$1" >/dev/null || die "$1 runs: halt it first"
		[ -e "$(home "$1")/disk" ] && [ ! -e "$(home "$2")/disk" ] && [ "$1" != node ] || die "$1 cannot become $2"
		gone "$1"
		mkdir -p "$(home "$2")"
		mv "$(home "$1")/disk" "$(home "$2")/disk"
		rm -rf "$(home "$1")"
		;;
	reinstall)
		known "$1"
		! pid "$1" >/dev/null || die "$1 runs: halt it first"
		reinstall "$1"
		;;
	remove)
		known "$1"
		[ "$1" != node ] || die "the first node is the control plane: cluster.sh down"
		gone "$1"
		rm -rf "$(home "$1")"
		;;
	*) die "usage: cluster.sh up|down|exec CMD|on NODE CMD|reboot [NODE]|halt NODE|start NODE|rename NODE NEW|reinstall NODE|remove NODE" ;;
	esac
}
# In one line: this file may change while it runs.
main "$@"; exit
