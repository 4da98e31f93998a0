#!/usr/bin/env bash
# A real Kubernetes of one node, on this machine, in namespaces of its own:
#
#   cluster.sh up         starts it; what runs is left running
#   cluster.sh down       ends every process of it and removes all that it made
#   cluster.sh reboot     ends every process, keeps the node's disk, starts again
#   cluster.sh exec CMD   runs CMD on the node
#
# The node is a process tree with its own pid, mount and network namespaces. Its
# root is this machine's, with all changes on a disk of its own (a file). So
# everything is where it is on any node, and ends with the node's PID 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
S=${CRUST_KUBERNETES_STATE:-$project/.cache/kubernetes/node}
bin=$project/.cache/kubernetes/bin
images=${CRUST_KUBERNETES_IMAGES:-$project/.cache/image}
patience=${CRUST_KUBERNETES_PATIENCE:-1} # a factor, for slow machines
cgroup=crust-kubernetes-$(echo "$S" | sha256sum | head -c 8)
export PATH=$PATH:/usr/sbin:/sbin
die() { echo "cluster: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root"

starttime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
# pid prints the node's PID 1, as this machine sees it.
pid() {
	local p at
	read -r p at 2>/dev/null <"$S/pid" || return 1
	[ -n "$at" ] && [ "$(starttime "$p")" = "$at" ] && echo "$p"
}
on_node() {
	local p
	p=$(pid) || die "the node does not run: cluster.sh up"
	nsenter -t "$p" -m -p -n -u -- env "PATH=$bin:$PATH" KUBECONFIG=/etc/kubernetes/admin.kubeconfig "$@"
}
cgroups() { awk '{for (i = 7; i <= NF; i++) if ($i == "-") { if ($(i+1) ~ /^cgroup2?$/) print $5; break }}' /proc/self/mountinfo; }

keys() {
	local k=$S/pki a n
	[ ! -e "$k/done" ] || return 0
	mkdir -p "$k"
	(
		cd "$k"
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=crust-test-ca -keyout ca.key -out ca.crt
		openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kube-apiserver -keyout api.key -out api.csr
		echo 'subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:192.0.2.1,DNS:localhost,DNS:kubernetes.default.svc' >san
		openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile san -out api.crt
		openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out sa.key
		openssl pkey -in sa.key -pubout -out sa.pub
		a=$(openssl rand -hex 16) n=$(openssl rand -hex 16)
		printf '%s,admin,admin,"system:masters"\n%s,system:node:node,node,"system:nodes"\n' "$a" "$n" >tokens
		for w in admin:$a node:$n; do
			cat >"${w%%:*}.kubeconfig" <<-K
				apiVersion: v1
				kind: Config
				current-context: test
				contexts: [{name: test, context: {cluster: test, user: test}}]
				clusters: [{name: test, cluster: {server: "https://127.0.0.1:443", certificate-authority-data: $(base64 -w0 ca.crt)}}]
				users: [{name: test, user: {token: ${w#*:}}}]
			K
		done
		touch done
	) 2>"$S/log/pki.log"
}

try() { # seconds what command...
	local end=$((SECONDS + $1 * patience)) what=$2
	shift 2
	until ("$@") >/dev/null 2>&1; do
		[ $SECONDS -lt "$end" ] || die "$what: not within its time; see $S/log"
		pid >/dev/null || die "the node ended; see $S/log/node.log"
		sleep 0.3
	done
}

up() {
	local f p child= t=$SECONDS
	mkdir -p "$S/log"
	if ! pid >/dev/null; then
		[ -x "$bin/hyper" ] || die "build it first: test/kubernetes/build.sh"
		keys
		# The kubelet overwrites these, and they are this machine's.
		if [ ! -e "$S/sysctl" ]; then
			for f in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
				[ ! -r "/proc/sys/$f" ] || echo "$f $(cat "/proc/sys/$f")"
			done >"$S/sysctl.new"
			mv "$S/sysctl.new" "$S/sysctl"
		fi
		if [ ! -e "$S/disk" ]; then
			truncate -s 40G "$S/disk.new"
			mkfs.xfs -q "$S/disk.new" # shares extents: snapshots take no time
			mv "$S/disk.new" "$S/disk"
		fi
		cgroups | while read -r f; do
			mkdir -p "$f/$cgroup"
			[ ! -e "$f/cgroup.controllers" ] || for p in $(cat "$f/cgroup.controllers"); do echo "+$p" >"$f/cgroup.subtree_control" || true; done
		done
		rm -f "$S/api.sock" "$S/ready"
		setsid unshare --mount --pid --net --uts --fork --kill-child --propagation slave "$here/node.sh" "$S" "$bin" "$images" "$cgroup" </dev/null >>"$S/log/node.log" 2>&1 &
		p=$!
		for f in $(seq 100); do
			child=$(cat "/proc/$p/task/$p/children" 2>/dev/null) && [ -n "$child" ] && break
			sleep 0.05
		done
		child=${child%% *}
		[ -n "$child" ] || die "the node did not start; see $S/log/node.log"
		echo "$child $(starttime "$child")" >"$S/pid"
	fi
	try 180 "API server" on_node kubectl get --raw /readyz
	try 90 "kubelet" on_node kubectl get node node
	try 120 "container images" test -e "$S/ready"
	on_node kubectl wait --for=condition=Ready node/node --timeout=$((90 * patience))s >/dev/null
	try 60 "default service account" on_node kubectl get serviceaccount default
	echo "cluster: up after $((SECONDS - t)) s; $here/cluster.sh exec kubectl get pods -A"
}

# loops prints the loop devices that the node made: over files of its disk, and,
# first, over those (the kubelet locks raw block volumes so).
loops() {
	local disk all name back ino
	disk=$(losetup -n -O NAME -j "$S/disk" | head -1)
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
	local p n m
	if p=$(pid); then
		kill -KILL "$p"
		for n in $(seq 100); do pid >/dev/null || break; sleep 0.1; done
	fi
	rm -f "$S/pid"
	# Cgroups outlive their processes; a kubelet that finds those of dead containers
	# takes a minute to start.
	cgroups | while read -r m; do
		[ ! -d "$m/$cgroup" ] || find "$m/$cgroup" -mindepth 1 -depth -type d -exec rmdir {} + 2>/dev/null || true
	done
	# So do loop devices, which would end with a machine; and the kernel's clean-up of namespaces takes a little.
	for n in $(seq 100); do
		loops | while read -r p; do losetup -d "$p" 2>/dev/null || true; done
		[ -n "$(losetup -n -O NAME -j "$S/disk" 2>/dev/null)" ] || break
		sleep 0.1
	done
}

# earlier rewrites this boot's id in the node's records, so that they look like an
# earlier boot's. (The kernel's cannot be changed.)
earlier() {
	local m id
	m=$(mktemp -d)
	id=$(cat /proc/sys/kernel/random/boot_id)
	mount -o loop "$S/disk" "$m"
	{ grep -rlF "$id" "$m"/upper/var/lib/csi-node "$m"/upper/var/lib/crust "$m"/upper/var/lib/crust-agent 2>/dev/null || true; } |
		while read -r f; do sed -i "s/$id/00000000-0000-0000-0000-000000000000/" "$f"; done
	umount "$m"
	rmdir "$m"
}

down() {
	local f v left
	[ -d "$S" ] || { echo "cluster: nothing at $S"; return; }
	halt
	cgroups | while read -r f; do [ ! -d "$f/$cgroup" ] || rmdir "$f/$cgroup" || true; done
	[ ! -e "$S/sysctl" ] || while read -r f v; do echo "$v" >"/proc/sys/$f"; done <"$S/sysctl"
	left=$(losetup -l -n -O NAME,BACK-FILE | grep -F "$S/" || true)
	[ -z "$left" ] || die "still there: $left"
	find "$S" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf {} +
	echo "cluster: down"
}

main() {
	case ${1:-} in
	keys) mkdir -p "$S/log" && keys ;; # for a node that has no openssl
	up) up ;;
	down) down ;;
	reboot)
		halt
		earlier
		up
		;;
	exec) shift && on_node "$@" ;;
	*) die "usage: cluster.sh up|down|reboot|exec CMD" ;;
	esac
}
# In one line: this file may change while it runs.
main "$@"; exit
