#!/usr/bin/env bash
# Scripts that run parts of Kubernetes' end-to-end tests source this file. It gives them a cluster of three nodes with the driver, the
# suite's images, and microVMs for its pods. The cluster is started if it does not run, and ended unless CRUST_KUBERNETES_KEEP is set.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
bin=$project/.cache/kubernetes/bin out=$project/.cache/kubernetes/suites
export CRUST_KUBERNETES_NODES=3 SOURCE_DATE_EPOCH=1767225600 KUBE_TEST_REPO_LIST=$here/storage/registries.yaml
cluster() { "$here/cluster.sh" "$@"; }
done_with() { [ -n "${CRUST_KUBERNETES_KEEP:-}" ] || cluster down; }
trap done_with EXIT

# One image under all the names that the suite asks for: agnhost, a shell and tools of this machine.
images() { # suite
	local name entry shell tools=() t f a n
	mkdir -p "$out/images"
	# busybox's nc has no UDP.
	for t in bash dd sha256sum mount blockdev nsenter timeout stat find grep nc.openbsd curl; do tools+=("$(command -v $t)"); done
	for f in $(ldd "${tools[@]}" | grep -o '/lib[^ :]*' | sort -u); do tools+=("$f"); done
	for f in "${!tools[@]}"; do tools[f]=${tools[f]}=$(echo "${tools[f]}" | sed 's|^/usr/bin/|/bin/|;s|^/usr/sbin/|/sbin/|;s|/nc.openbsd$|/nc|'); done
	for a in $(/bin/busybox --list); do
		[[ " ${tools[*]} " == *"=/bin/$a "* || " ${tools[*]} " == *"=/sbin/$a "* || $a == busybox || $a == sh ]] || tools+=("/bin/$a->busybox")
	done
	"$bin/$1.test" -list-images >"$out/names"
	while read -r name; do
		entry=(-entrypoint /agnhost)
		# busybox's shell prefers its own dd and nc. The tests of pods expect its error messages of the image that is called so.
		shell=bash
		[[ $name != */busybox:* ]] || entry=()
		[[ $1 != pods || $name != */busybox:* ]] || shell=busybox
		f=$out/images/$(echo "$name" | tr -c 'a-z0-9\n' -).tar
		"$project/.cache/image/bin/image" -out "$f" -name "$name" "${entry[@]}" /bin/busybox=/bin/busybox "$bin/agnhost=/agnhost" "/agnhost-2->agnhost" "$project/.cache/image/passwd=/etc/passwd=644" "$project/.cache/image/passwd=/tmp/.keep=644" "${tools[@]}" "/bin/sh->$shell"
		for n in node node-2 node-3; do cluster on "$n" ctr -n k8s.io images import --local "$f" >/dev/null 2>&1; done
	done <"$out/names"
}

# begin SUITE: a cluster that is ready for it.
begin() {
	local w m
	cluster up
	cluster exec kubectl apply -k "$bin/crd" >/dev/null
	cluster exec kubectl wait --for=condition=Established crd/volumesnapshotclasses.snapshot.storage.k8s.io --timeout=30s >/dev/null
	cluster exec kubectl apply -k "$here/overlay" >/dev/null
	for w in daemonset/csi-node daemonset/csi-sidecars deployment/csi-resizer deployment/csi-steward; do
		cluster exec kubectl -n crust-csi rollout status "$w" --timeout=120s >/dev/null
	done
	cluster exec kubectl taint node --all crust.test/fleet- >/dev/null 2>&1 || true # what the other tests set
	images "$1"
	if [ -n "${MICROVM:-}" ]; then
		m=$project/deploy/kubernetes/microvm
		cluster exec kubectl apply -f "$m/daemonset.yaml" -f "$m/runtimeclass.yaml" -f "$here/storage/microvm/pods.yaml" >/dev/null
		cluster exec kubectl -n crust-csi rollout status daemonset/crust-vm --timeout=120s >/dev/null
	fi
}
microvms() { cluster exec kubectl -n crust-csi logs -l app.kubernetes.io/name=crust-vm --tail=-1 | { grep -c 'method=RegisterSandbox ' || true; }; }
# specs NAME SECTION FOCUS PATTERN... -- ARGS...: runs what matches FOCUS and no PATTERN, with arguments for the suite, and prints what ran,
# was skipped, and failed.
specs() {
	local name=$1 section=$2 focus=$3 patterns=() failed=0
	shift 3
	while [ "$1" != -- ]; do patterns+=("$1") && shift; done
	shift
	mkdir -p "$out/$name"
	cluster exec env "KUBE_TEST_REPO_LIST=$KUBE_TEST_REPO_LIST" "$bin/ginkgo" -procs="${PROCS:-10}" -no-color -timeout=60m \
		-focus="$focus" -skip="$(IFS="|"; echo "${patterns[*]}")" -output-dir="$out/$name" -json-report=report.json \
		"$@" -kubeconfig=/etc/kubernetes/admin.kubeconfig -kubectl-path="$bin/kubectl" -provider=local >"$out/$name/log" 2>&1 || failed=1
	echo "$name: $(grep -aE '^Ran [0-9]+ of [0-9]+ Specs' "$out/$name/log" | tail -1) $(grep -aE '^(SUCCESS|FAIL)! ' "$out/$name/log" | tail -1)"
	go run "$here/skips" "$out/$name/report.json" "$project/docs/conformance.md" "$section" "$focus" "${patterns[@]}" || failed=1
	[ -z "${MICROVM:-}" ] || echo "$name: $(microvms) pods in microVMs so far"
	sed -n '/Summarizing/,/^Ran /p' "$out/$name/log" | grep -a '\[FAIL\]' || true
	return $failed
}
