#!/usr/bin/env bash
# What the scripts that run parts of Kubernetes' end-to-end tests share, which read this: a cluster of three nodes with the driver, the
# suite's images, and microVMs for its pods. The cluster is started if it does not run, and ended unless CRUST_KUBERNETES_KEEP is set.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
bin=$project/.cache/kubernetes/bin out=$project/.cache/kubernetes/storage
export CRUST_KUBERNETES_NODES=3 SOURCE_DATE_EPOCH=1767225600 KUBE_TEST_REPO_LIST=$here/storage/registries.yaml
cluster() { "$here/cluster.sh" "$@"; }
done_with() { [ -n "${CRUST_KUBERNETES_KEEP:-}" ] || cluster down; }
trap done_with EXIT

# One image under all the names that the suite asks for: agnhost, a shell and tools of this machine.
images() { # suite
	local name entry tools=() t f
	mkdir -p "$out/images"
	# busybox's nc has no UDP.
	command -v nc.openbsd >/dev/null && command -v curl >/dev/null ||
		apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends netcat-openbsd curl >/dev/null
	for t in bash dd sha256sum mount blockdev nsenter timeout stat find grep nc.openbsd curl; do tools+=("$(command -v $t)"); done
	for f in $(ldd "${tools[@]}" | grep -o '/lib[^ :]*' | sort -u); do tools+=("$f"); done
	for f in "${!tools[@]}"; do tools[f]=${tools[f]}=$(echo "${tools[f]}" | sed 's|^/usr/bin/|/bin/|;s|^/usr/sbin/|/sbin/|;s|/nc.openbsd$|/nc|'); done
	for a in $(/bin/busybox --list); do
		[[ " ${tools[*]} " == *"=/bin/$a "* || " ${tools[*]} " == *"=/sbin/$a "* || $a == busybox || $a == sh ]] || tools+=("/bin/$a->busybox")
	done
	# busybox's shell prefers its own dd; the tests of pods know its words.
	if [ "$1" = storage ]; then tools+=("/bin/sh->bash"); else tools+=("/bin/sh->busybox"); fi
	"$bin/$1.test" -list-images >"$out/names"
	while read -r name; do
		case $name in
		*/pause:*) entry=(/agnhost pause) ;;
		*/busybox:*) entry=() ;;
		*) entry=(/agnhost) ;;
		esac
		f=$out/images/$(echo "$name" | tr -c 'a-z0-9\n' -).tar
		"$project/.cache/image/bin/image" -out "$f" -name "$name" "${entry[@]/#/-entrypoint=}" /bin/busybox=/bin/busybox "$bin/agnhost=/agnhost" "$project/.cache/image/passwd=/etc/passwd=644" "$project/.cache/image/passwd=/tmp/.keep=644" "${tools[@]}"
		for n in node node-2 node-3; do cluster on "$n" ctr -n k8s.io images import --local "$f" >/dev/null 2>&1; done
	done <"$out/names"
}

# begin SUITE: a cluster that is ready for it.
begin() {
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
# explain REPORT SECTION FOCUS PATTERN...: prints the outcomes, and fails if docs/conformance.md has no reason for a spec that did not run.
explain() { go run "$here/skips" "$1" "$project/docs/conformance.md" "${@:2}"; }
