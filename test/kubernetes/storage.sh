#!/usr/bin/env bash
# Kubernetes' own storage suite (External.Storage of its end-to-end tests) against the driver, on three nodes:
#
#   storage.sh KIND...    ext4 xfs btrfs, described in storage/KIND.yaml
#
# FOCUS is a regular expression of specs (default: all). QUICK leaves out those that the suite calls slow. MICROVM runs the suite's pods in
# microVMs. The cluster is started if it does not run, and ended unless CRUST_KUBERNETES_KEEP is set. Prints the run, skipped and failed
# specs of each kind.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
bin=$project/.cache/kubernetes/bin out=$project/.cache/kubernetes/storage
export CRUST_KUBERNETES_NODES=3 SOURCE_DATE_EPOCH=1767225600
cluster() { "$here/cluster.sh" "$@"; }
done_with() { [ -n "${CRUST_KUBERNETES_KEEP:-}" ] || cluster down; }
trap done_with EXIT

# One image under all the names that the suite asks for: agnhost, a shell and tools of this machine.
images() {
	local name tools=() t f
	mkdir -p "$out/images"
	for t in bash dd sha256sum mount blockdev nsenter timeout stat find grep; do tools+=("$(command -v $t)"); done
	for f in $(ldd "${tools[@]}" | grep -o '/lib[^ :]*' | sort -u); do tools+=("$f"); done
	for f in "${!tools[@]}"; do tools[f]=$(echo "${tools[f]}" | sed 's|^/usr/bin/|/bin/|;s|^/usr/sbin/|/sbin/|'); tools[f]=${tools[f]}=${tools[f]}; done
	for a in $(/bin/busybox --list); do
		[[ " ${tools[*]} " == *"=/bin/$a "* || " ${tools[*]} " == *"=/sbin/$a "* || $a == busybox || $a == sh ]] || tools+=("/bin/$a->busybox")
	done
	tools+=("/bin/sh->bash") # busybox's shell prefers its own dd
	"$bin/storage.test" -list-images >"$out/names"
	while read -r name; do
		f=$out/images/$(echo "$name" | tr -c 'a-z0-9\n' -).tar
		"$project/.cache/image/bin/image" -out "$f" -name "$name" -entrypoint /agnhost /bin/busybox=/bin/busybox "$bin/agnhost=/agnhost" "$project/.cache/image/passwd=/etc/passwd=644" "$project/.cache/image/passwd=/tmp/.keep=644" "${tools[@]}"
		for n in node node-2 node-3; do cluster on "$n" ctr -n k8s.io images import --local "$f" >/dev/null 2>&1; done
	done <"$out/names"
}

export KUBE_TEST_REPO_LIST=$here/storage/registries.yaml
cluster up
cluster exec kubectl apply -k "$bin/crd" >/dev/null
cluster exec kubectl wait --for=condition=Established crd/volumesnapshotclasses.snapshot.storage.k8s.io --timeout=30s >/dev/null
cluster exec kubectl apply -k "$here/overlay" >/dev/null
for w in daemonset/csi-node daemonset/csi-sidecars deployment/csi-resizer deployment/csi-steward; do
	cluster exec kubectl -n crust-csi rollout status "$w" --timeout=120s >/dev/null
done
cluster exec kubectl taint node --all crust.test/fleet- >/dev/null 2>&1 || true # what the other tests set
images
if [ -n "${MICROVM:-}" ]; then
	m=$project/deploy/kubernetes/microvm
	cluster exec kubectl apply -f "$m/daemonset.yaml" -f "$m/runtimeclass.yaml" -f "$here/storage/microvm/pods.yaml" >/dev/null
	cluster exec kubectl -n crust-csi rollout status daemonset/crust-vm --timeout=120s >/dev/null
fi
microvms() { cluster exec kubectl -n crust-csi logs -l app.kubernetes.io/name=crust-vm --tail=-1 | { grep -c 'method=RegisterSandbox ' || true; }; }
failed=0 focus=${FOCUS:-External Storage}
for kind; do
	mkdir -p "$out/$kind"
	skip=('\[Disruptive\]' '\[Feature:Windows' '\[Feature:VolumeAttributesClass' 'with any volume data source')
	[ -z "${QUICK:-}" ] || skip+=('\[Slow\]')
	# ext4 grows while it is mounted only with CAP_SYS_RESOURCE, which root of some machines lacks (containers, mostly).
	if [ "$kind" = ext4 ] && [ $((0x$(awk '$1 == "CapEff:" {print $2}' /proc/self/status) >> 24 & 1)) = 0 ]; then
		echo "storage ext4: without growth, because this machine's root lacks CAP_SYS_RESOURCE"
		skip+=(volume-expand 'support expansion of pvcs')
	fi
	more=$here/storage/microvm/$kind.yaml
	# The mount of a guest's virtiofs, by which it gets what the node mounted, has a type and options of its own.
	[ -z "${MICROVM:-}" ] || [ -e "$more" ] || skip+=('provision storage with mount options' '\(ext4\)\] volumes should store data')
	# Their exec probe has one second to answer, which an emulated guest often needs.
	[ -z "${MICROVM:-}" ] || skip+=('should support restarting containers')
	# Who refuses such a subPath is the sandbox, when the container starts; these specs look for the kubelet's refusal before that.
	[[ $kind != sandbox-* ]] || skip+=('should fail if .* outside the volume')
	[ -z "${MICROVM:-}" ] || [ ! -e "$more" ] || cluster exec kubectl apply -f "$more" >/dev/null
	cluster exec env "KUBE_TEST_REPO_LIST=$KUBE_TEST_REPO_LIST" "$bin/ginkgo" -procs="${PROCS:-10}" -no-color -timeout=60m \
		-focus="$focus" -skip="$(IFS="|"; echo "${skip[*]}")" -output-dir="$out/$kind" -json-report=report.json \
		"$bin/storage.test" -- -kubeconfig=/etc/kubernetes/admin.kubeconfig -kubectl-path="$bin/kubectl" -provider=local -storage.testdriver="$here/storage/$kind.yaml" \
		>"$out/$kind/log" 2>&1 || failed=1
	echo "storage $kind: $(grep -aE '^Ran [0-9]+ of [0-9]+ Specs' "$out/$kind/log" | tail -1) $(grep -aE '^(SUCCESS|FAIL)! ' "$out/$kind/log" | tail -1)"
	go run "$here/storage/skips" "$out/$kind/report.json" "$project/docs/conformance.md" "$focus" "${skip[@]}" || failed=1
	[ -z "${MICROVM:-}" ] || echo "storage $kind: $(microvms) pods in microVMs so far"
	[ -z "${MICROVM:-}" ] || [ ! -e "$more" ] || cluster exec kubectl delete -f "$more" >/dev/null
	sed -n '/Summarizing/,/^Ran /p' "$out/$kind/log" | grep -a '\[FAIL\]' || true
done
exit $failed
