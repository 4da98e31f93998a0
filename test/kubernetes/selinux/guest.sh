#!/usr/bin/env bash
# In the guest: a cluster on a node whose kernel enforces SELinux, and pods with levels. Prints what they, the node
# and the API server see: "POD NAME: VALUE" a line.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../../.."
project=$PWD
S=$project/.cache/kubernetes/selinux
export PATH=$PATH:/usr/sbin:/sbin CRUST_KUBERNETES_PATIENCE=5 CRUST_KUBERNETES_STATE=/var/lib/node CRUST_KUBERNETES_IMAGES=$S/images
export CRUST_KUBERNETES_GATES=SELinuxMount=true # else a kubelet hands labels of ReadWriteOncePod volumes only to a driver
mkdir -p $CRUST_KUBERNETES_STATE /usr/lib/cni
mkdir -p "$S/log"; ln -s "$S/log" $CRUST_KUBERNETES_STATE/log
cp -r "$S/pki" $CRUST_KUBERNETES_STATE/
cp "$S"/cni/* /usr/lib/cni/
for m in overlay veth xfs; do modprobe "$m"; done
. test/kubernetes/selinux/policy.sh "$project"
echo 1000000 >/proc/sys/kernel/printk_ratelimit_burst # every denial is logged
echo 1 >/sys/fs/selinux/enforce
node() { test/kubernetes/cluster.sh exec "$@"; }
denials() { dmesg | grep 'avc:  denied' || true; }
give_up() {
	node kubectl get pods -A -o wide || true
	node kubectl describe "${@:-pods}" || true
	node kubectl -n crust-csi describe pods || true
	node kubectl -n crust-csi logs ds/csi-node -c csi-node --tail=50 || true
	denials | tail -n 40
	exit 1
}
test/kubernetes/cluster.sh up || give_up
node kubectl apply -k "$project/.cache/kubernetes/bin/crd" >/dev/null
node kubectl apply -k "$project/test/kubernetes/selinux/overlay" >/dev/null

claim() { # name access mode
	node kubectl apply -f - <<-Y
		apiVersion: v1
		kind: PersistentVolumeClaim
		metadata: {name: $1}
		spec: {storageClassName: crust-ext4, accessModes: [$2], resources: {requests: {storage: 64Mi}}}
	Y
}
pod() { # name securityContext volume
	node kubectl apply -f - <<-Y
		apiVersion: v1
		kind: Pod
		metadata: {name: $1}
		spec:
		  terminationGracePeriodSeconds: 1
		  automountServiceAccountToken: false
		  securityContext: {$2}
		  containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: v, mountPath: /data}]}]
		  volumes: [{name: v, $3}]
	Y
}
ready() { node kubectl wait --for=condition=Ready "pod/$1" --timeout=900s || give_up "pod/$1"; }
of_claim() { echo "persistentVolumeClaim: {claimName: $1}"; }
target() { # the pod's directory of its volume, on the node
	local uid
	uid=$(node kubectl get pod "$1" -o 'jsonpath={.metadata.uid}')
	node awk -v uid="$uid" '$5 ~ uid "/volumes/kubernetes.io~csi" { print $5; exit }' /proc/1/mountinfo
}
# see has a pod write to its volume, and prints what it and the node see of it.
see() { # pod
	local t
	ready "$1"
	node kubectl exec "$1" -- sh -c 'echo "process: $(tr -d "\\0" </proc/self/attr/current)"
		echo "write: $(echo line >>/data/file && wc -l </data/file)"; echo "mount: $(grep " /data " /proc/self/mountinfo)"' | sed "s/^/$1 /"
	t=$(target "$1")
	echo "$1 node: $(node grep " $t " /proc/1/mountinfo)"
	echo "$1 file: $(node stat -c %C "$t/file")"
}

A='seLinuxOptions: {level: "s0:c10,c20"}' B='seLinuxOptions: {level: "s0:c3,c4"}'
claim data ReadWriteOncePod
pod owner "$A" "$(of_claim data)"
see owner
# Two pods with the node's directory of all pods' volumes: one has the owner's level, the other has not.
pod same "$A" 'hostPath: {path: /var/lib/kubelet/pods}'
pod other "$B" 'hostPath: {path: /var/lib/kubelet/pods}'
file=$(target owner)/file
for spy in same other; do
	ready $spy
	dmesg -C
	echo "$spy read: $(node kubectl exec $spy -- sh -c "cat /data${file#/var/lib/kubelet/pods} 2>&1 || true")"
	echo "$spy write: $(node kubectl exec $spy -- sh -c "{ echo no >>/data${file#/var/lib/kubelet/pods}; } 2>&1 || true")"
	echo "$spy denials: $(denials | grep -c 'tcontext=system_u:object_r:svirt_image_t:s0:c10,c20 .*permissive=0' || true)"
done
echo "owner has: $(node kubectl exec owner -- sh -c 'cat /data/file' | tr '\n' ,)"

# The next pod has another level, and the same files.
node kubectl delete pod owner --timeout=900s
pod next "$B" "$(of_claim data)"
see next

# The runtime labels the files, one by one.
claim plain ReadWriteOnce
pod plain "" "$(of_claim plain)"
see plain
node kubectl delete pod plain --timeout=900s
pod recursive "$A, seLinuxChangePolicy: Recursive" "$(of_claim plain)"
see recursive

# Two pods of unlike levels want one volume at once.
claim shared ReadWriteOnce
pod first "$A" "$(of_claim shared)"
see first
pod second "$B" "$(of_claim shared)"
for _ in $(seq 300); do
	event=$(node kubectl get events --field-selector involvedObject.name=second,reason=FailedMount -o 'jsonpath={.items[*].message}')
	[ -z "$event" ] || break
	sleep 3
done
echo "second event: $event"
echo "second warning: $(node kubectl get events --field-selector involvedObject.name=second,reason=SELinuxLabelConflict -o 'jsonpath={.items[*].message}')"
node kubectl get --raw /api/v1/nodes/node/proxy/metrics | sed -n 's/^volume_manager_selinux_volume_context_mismatch_errors_total/kubelet metric: &/p'
echo "enforcing now: $(cat /sys/fs/selinux/enforce)"
denials | tail -n 40
