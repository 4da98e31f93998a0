#!/usr/bin/env bash
# Shows a pod in a microVM, under a real kubelet: a cluster of one node on this machine, a claim that the guest mounts and the node never
# does, growth while the pod writes, and a damaged file system that ends nothing but the guest. Leaves nothing behind.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
project=$PWD
export PATH=$PATH:/usr/sbin:/sbin CRUST_KUBERNETES_NODES=1 CRUST_KUBERNETES_STATE=$project/.cache/kubernetes/demo
if [ -t 1 ]; then bold=$(tput bold) dim=$(tput dim) plain=$(tput sgr0); else bold='' dim='' plain=''; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
note() { printf '%s  %s%s\n' "$dim" "$*" "$plain"; }
cluster() { test/kubernetes/cluster.sh "$@"; }
kubectl() { cluster exec kubectl "$@"; }
in_pod() { kubectl exec writer -- sh -c "$1"; }
on_node() { cluster exec bash -c "$1"; }
clean_up() {
	status=$?
	trap - EXIT INT TERM
	if [ "$status" != 0 ]; then
		say "The demo did not end well. The last events:"
		kubectl get events --sort-by=.lastTimestamp 2>/dev/null | tail -n 15 || true
	fi
	cluster down >/dev/null 2>&1 || true
	rm -rf --one-file-system "$CRUST_KUBERNETES_STATE"
	exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# until WHAT COMMAND...: waits for a command to succeed, five minutes at most.
until_ok() {
	local what=$1 begin=$SECONDS
	shift
	until "$@" >/dev/null 2>&1; do
		[ $((SECONDS - begin)) -lt 300 ] || { echo "  $what: not within five minutes"; return 1; }
		sleep 0.5
	done
	printf '  %-58s %4d s\n' "$what" $((SECONDS - begin))
}

say "1. A cluster of one node, with Crust CSI and its runtime for microVMs"
cluster up >/dev/null
kubectl apply -k "$project/.cache/kubernetes/bin/crd" >/dev/null
kubectl wait --for=condition=Established crd/volumesnapshotclasses.snapshot.storage.k8s.io --timeout=60s >/dev/null
kubectl apply -k "$project/deploy/kubernetes/microvm" >/dev/null
for d in csi-node csi-sidecars crust crust-agent crust-vm; do
	until_ok "DaemonSet $d" kubectl -n crust-csi rollout status "daemonset/$d" --timeout=10s
done

say "2. A pod with the RuntimeClass crust-vm, and a claim"
kubectl apply -f - >/dev/null <<'Y'
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: guests}, provisioner: csi.crust.dev, allowVolumeExpansion: true,
 volumeBindingMode: WaitForFirstConsumer, parameters: {pool: default, csi.storage.k8s.io/fstype: xfs, allowRuntimeAssistedMount: "true"}}
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data},
 spec: {storageClassName: guests, accessModes: [ReadWriteOncePod], resources: {requests: {storage: 320Mi}}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: writer}, spec: {runtimeClassName: crust-vm, terminationGracePeriodSeconds: 1,
 containers: [{name: c, image: "localhost/test/busybox:1", resources: {requests: {cpu: 500m}},
  command: [sh, -c, "while :; do date >>/data/log; sleep 0.1; done"], volumeMounts: [{name: data, mountPath: /data}]}],
 volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]}}
Y
until_ok "the pod runs" in_pod 'test -s /data/log'
note "this node: Linux $(uname -r); the pod: Linux $(in_pod 'uname -r')"

say "3. Two mount tables"
pv=$(kubectl get pvc data -o 'jsonpath={.spec.volumeName}')
note "the node, at the pod's target: $(on_node "awk '/$pv/ { print \$(NF-2), \$(NF-1) }' /proc/1/mountinfo")"
note "the pod:                       $(in_pod "grep ' /data ' /proc/mounts")"

say "4. The claim grows while the pod writes"
before=$(in_pod "df -m /data | awk 'END { print \$2 }'")
kubectl patch pvc data -p '{"spec": {"resources": {"requests": {"storage": "640Mi"}}}}' >/dev/null
grown() { [ "$(in_pod "df -m /data | awk 'END { print \$2 }'")" -gt $((before + 200)) ]; }
until_ok "the guest's file system has grown" grown
note "$(in_pod 'df -h /data | tail -1')"

say "5. The file system is attacked from inside"
# The pod's kernel is the tenant's: here the node does to the device what a hostile guest can do to it, and has the guest read that.
handle=$(kubectl get pv "$pv" -o 'jsonpath={.spec.csi.volumeHandle}')
image=$(on_node "losetup -n -O BACK-FILE | grep -m1 '/${handle#*.}'")
on_node "dd if=/dev/urandom of=$image bs=64k seek=1 count=10200 conv=notrunc,fsync status=none"
answer=$(in_pod 'i=0; while [ $i -lt 200 ]; do mkdir /data/d$i || exit; i=$((i+1)); done; sync; ls -R /data' 2>&1 | grep -m1 /data || true)
note "the pod: ${answer:-nothing}"
note "the guest's kernel: $(on_node "grep -hiE -m1 'xfs.*(corrupt|error|shut)' /run/crust/pods/*/console.log" || echo 'nothing on its console')"
note "the node's kernel has never parsed it: $(on_node "awk '/$pv/ && / xfs /' /proc/1/mountinfo" | wc -l) mounts of it"
until_ok "the node is well, and runs another pod" sh -c "$(declare -f cluster kubectl); cd $project
	kubectl run other --image=localhost/test/busybox:1 --restart=Never --command -- true 2>/dev/null
	kubectl get pod other -o 'jsonpath={.status.phase}' | grep -q Succeeded"

say "6. Away with it"
kubectl delete pod writer other --grace-period=1 --timeout=120s >/dev/null
kubectl delete pvc data --timeout=120s >/dev/null
none_left() { on_node "! ls /run/crust/pods | grep -v '^lock$'"; }
until_ok "no microVM is left" none_left
