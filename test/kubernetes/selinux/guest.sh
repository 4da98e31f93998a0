#!/usr/bin/env bash
# In the guest: a cluster, and two pods of different levels, one after the other, on
# one volume. Prints what they and the node see, "NAME: VALUE" a line.
set -euo pipefail
cd "$(dirname "$0")/../../.."
project=$PWD
S=$project/.cache/kubernetes/selinux
export PATH=$PATH:/usr/sbin:/sbin CRUST_KUBERNETES_PATIENCE=5 CRUST_KUBERNETES_STATE=/var/lib/node CRUST_KUBERNETES_IMAGES=$S/images
mkdir -p $CRUST_KUBERNETES_STATE /usr/lib/cni
mkdir -p "$S/log"; ln -s "$S/log" $CRUST_KUBERNETES_STATE/log
cp -r "$S/pki" $CRUST_KUBERNETES_STATE/
cp "$S"/cni/* /usr/lib/cni/
for m in overlay veth xfs; do modprobe "$m"; done
# Debian's policy does not have the types that its lxc_contexts names.
cat >/etc/selinux/default/contexts/lxc_contexts <<'C'
process = "system_u:system_r:svirt_t:s0"
file = "system_u:object_r:svirt_image_t:s0"
ro_file = "system_u:object_r:svirt_image_t:s0"
C
node() { test/kubernetes/cluster.sh exec "$@"; }
test/kubernetes/cluster.sh up
node kubectl apply -k "$project/.cache/kubernetes/bin/crd" >/dev/null
node kubectl apply -k "$project/test/kubernetes/selinux/overlay" >/dev/null
node kubectl apply -f - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {storageClassName: crust-ext4, accessModes: [ReadWriteOncePod], resources: {requests: {storage: 64Mi}}}
Y
for level in s0:c10,c20 s0:c3,c4; do
	sed "s/LEVEL/$level/" <<'Y' | node kubectl apply -f -
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {seLinuxOptions: {level: "LEVEL"}}
  containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: v, mountPath: /data}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]
Y
	if ! node kubectl wait --for=condition=Ready pod/p --timeout=600s; then
		node kubectl describe pod p
		node kubectl -n crust-csi logs ds/csi-node -c csi-node --tail=50
		exit 1
	fi
	node kubectl exec p -- sh -c 'echo "process: $(tr -d "\\0" </proc/self/attr/current)"; echo >>/data/f; echo "lines: $(wc -l </data/f)"; echo "pod: $(grep " /data " /proc/self/mountinfo)"'
	target=$(node awk '$5 ~ "kubernetes.io~csi" { print $5; exit }' /proc/1/mountinfo)
	echo "node: $(node grep " $target " /proc/1/mountinfo)"
	echo "file: $(node ls -Z "$target/f")"
	node kubectl delete pod p --timeout=300s
done
