#!/usr/bin/env bash
# PID 1 of a node that cluster.sh makes: mounts, network, and the processes
# that a node and, on the first, a control plane consist of, each started again when it ends,
# as a service manager would.
set -euo pipefail
export LC_ALL=C
name=$1 number=$2 S=$3 pki=$4 bin=$5 images=$6 cgroup=$7
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PATH=$bin:$PATH

# --- disk ---------------------------------------------------------------------
mkdir -p "$S/mnt"
mount -t tmpfs none "$S/mnt" # only this namespace sees what is below
mkdir "$S"/mnt/{disk,root}
mount -o loop "$S/disk" "$S/mnt/disk"
D=$S/mnt/disk R=$S/mnt/root
mkdir -p "$D"/{upper,work,containerd,kubelet,crust-csi,etcd}
mount -t overlay none -o "lowerdir=/,upperdir=$D/upper,workdir=$D/work" "$R"
for d in proc sys dev tmp run; do mkdir -p "$R/$d"; done
mount -t proc proc "$R/proc"
mount --rbind /sys "$R/sys"
mount --rbind /dev "$R/dev"
mount -t tmpfs -o mode=0755 none "$R/run"
mount -t tmpfs -o mode=1777 none "$R/tmp"
mkdir -p "$R"/var/lib/{containerd,kubelet,crust-csi,etcd}
for d in containerd kubelet crust-csi etcd; do mount --bind "$D/$d" "$R/var/lib/$d"; done
mkdir -p "$R/old"
cd "$R"
pivot_root . old
cd /
# What is under an overlay must not change; the project and the state may.
for d in "$project" "$S"; do
	mkdir -p "$d" # it may lie in /tmp
	mount --bind "/old$d" "$d"
done
mount --make-rshared /
# crun refuses a machine that has controllers in both hierarchies of cgroups: its node has the first alone.
oci=$(command -v "${CRUST_KUBERNETES_OCI:-runc}")
if [ "${oci##*/}" = crun ] && mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mkdir -p /run/{lock,test}
log=$S/log

# --- network --------------------------------------------------------------------
# cluster.sh lays the cable from the first node to each other.
hostname "$name"
ip link set lo up
if [ "$number" = 1 ]; then
	ip address add 192.0.2.1/32 dev lo # the node's
	ip address add 10.96.0.1/32 dev lo # of the service "kubernetes"
	ip route add default dev lo
fi
echo 1 >/proc/sys/net/ipv4/ip_forward
mkdir -p /etc/cni/net.d
cat >/etc/cni/net.d/10-test.conflist <<C
{"cniVersion": "1.0.0", "name": "test", "plugins": [{
  "type": "ptp", "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": "10.244.$number.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
C

# --- control plane ----------------------------------------------------------------
mkdir -p /etc/kubernetes
cp "/old$pki"/* /etc/kubernetes/
keep() { # name command...
	local name=$1
	shift
	(
		while :; do
			"$@" </dev/null >>"$log/$name.log" 2>&1 &
			echo $! >"/run/test/$name.pid"
			wait $! || true
			echo "=== $name ended" >>"$log/$name.log"
			sleep 0.5
		done
	) &
}
# urgent is keep, for what others wait for. It collects less garbage: memory is cheaper here than processors.
urgent() { keep "$1" nice -n -10 env GOGC=400 "$@"; }
K=/etc/kubernetes
selinux=false controllers='*'
# The controller writes an event on pods whose labels of one volume conflict. It is off until it is asked for.
[ ! -e /sys/fs/selinux/policy ] || selinux=true controllers='*,selinux-warning-controller'
gates=${CRUST_KUBERNETES_GATES:+--feature-gates=$CRUST_KUBERNETES_GATES}
if [ "$number" = 1 ]; then # the control plane
	urgent etcd --name test --data-dir /var/lib/etcd/data --unsafe-no-fsync
	# What the driver's accounts ask for: cost_test.go.
	cat >$K/audit.yaml <<-A
		apiVersion: audit.k8s.io/v1
		kind: Policy
		omitStages: [RequestReceived]
		rules: [{level: Metadata, userGroups: ["system:serviceaccounts:crust-csi"]}, {level: None}]
	A
	urgent kube-apiserver $gates --audit-policy-file $K/audit.yaml --audit-log-path $K/audit.log --audit-log-maxsize 500 --etcd-servers http://127.0.0.1:2379 --bind-address 0.0.0.0 --secure-port 443 --advertise-address 192.0.2.1 \
		--tls-cert-file $K/api.crt --tls-private-key-file $K/api.key --client-ca-file $K/ca.crt --token-auth-file $K/tokens \
		--authorization-mode Node,RBAC --allow-privileged --service-cluster-ip-range 10.96.0.0/24 --kubelet-preferred-address-types InternalIP \
		--service-account-issuer https://kubernetes.default.svc --service-account-key-file $K/sa.pub --service-account-signing-key-file $K/sa.key
	urgent kube-controller-manager $gates --controllers="$controllers" --kubeconfig $K/admin.kubeconfig --leader-elect=false --bind-address 127.0.0.1 \
		--root-ca-file $K/ca.crt --service-account-private-key-file $K/sa.key --node-monitor-grace-period 40s
	urgent kube-scheduler $gates --kubeconfig $K/admin.kubeconfig --leader-elect=false --bind-address 127.0.0.1
	# An add-on, which needs the CRDs of snapshots and is started again until they are there.
	keep snapshot-controller snapshot-controller --kubeconfig $K/admin.kubeconfig --enable-distributed-snapshotting=true
	# For clients on this machine, which are in another network.
	keep api socat "UNIX-LISTEN:$S/api.sock,fork,mode=600,unlink-early" TCP:127.0.0.1:443
fi

# --- node ---------------------------------------------------------------------------
mkdir -p /etc/containerd
runtimes() { # the name of the plugin that runs containers
	cat <<-C
		[plugins.'$1'.containerd.runtimes.runc]
		  runtime_type = 'io.containerd.runc.v2'
		[plugins.'$1'.containerd.runtimes.runc.options]
		  BinaryName = '$oci'
		[plugins.'$1'.containerd.runtimes.crust]
		  runtime_type = 'io.containerd.runc.v2'
		[plugins.'$1'.containerd.runtimes.crust.options]
		  BinaryName = '/opt/crust/bin/crust-oci'
		[plugins.'$1'.containerd.runtimes.crust-vm]
		  runtime_type = 'io.containerd.runc.v2'
		[plugins.'$1'.containerd.runtimes.crust-vm.options]
		  BinaryName = '/opt/crust/bin/crust-vm'
	C
}
case $(containerd --version) in
*\ v1.* | *\ 1.*) # where NRI is off until it is asked for
	cat <<-C
		version = 2
		[plugins.'io.containerd.nri.v1.nri']
		  disable = false
		[plugins.'io.containerd.grpc.v1.cri']
		  sandbox_image = 'localhost/test/pause:1'
		  enable_selinux = $selinux
		  tolerate_missing_hugetlb_controller = true
		  restrict_oom_score_adj = true # for machines without CAP_SYS_RESOURCE
		[plugins.'io.containerd.grpc.v1.cri'.cni]
		  bin_dir = '/usr/lib/cni'
		$(runtimes io.containerd.grpc.v1.cri)
	C
	;;
*)
	cat <<-C
		version = 3
		imports = []
		disabled_plugins = ['io.containerd.snapshotter.v1.erofs', 'io.containerd.snapshotter.v1.blockfile', 'io.containerd.tracing.processor.v1.otlp']
		[plugins.'io.containerd.cri.v1.images'.pinned_images]
		  sandbox = 'localhost/test/pause:1'
		[plugins.'io.containerd.cri.v1.runtime']
		  cdi_spec_dirs = []
		  enable_selinux = $selinux
		  tolerate_missing_hugetlb_controller = true
		  restrict_oom_score_adj = true # for machines without CAP_SYS_RESOURCE
		[plugins.'io.containerd.cri.v1.runtime'.cni]
		  bin_dirs = ['/usr/lib/cni']
		  use_internal_loopback = true
		$(runtimes io.containerd.cri.v1.runtime)
	C
	;;
esac >/etc/containerd/config.toml
# What crust-oci starts, if it is not the runc in containerd's PATH.
if [ "${oci##*/}" != runc ]; then
	mkdir -p /etc/crust
	echo "{\"runtime\": \"$oci\"}" >/etc/crust/oci.json
fi
keep containerd containerd --config /etc/containerd/config.toml
cat >/etc/kubernetes/kubelet.yaml <<C
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
enforceNodeAllocatable: []
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failSwapOn: false
makeIPTablesUtilChains: false
resolvConf: ""
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 1Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0%}
syncFrequency: 10s
volumeStatsAggPeriod: 10s
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
C
older=()
case $(kubelet --version) in
*\ v1.3[234].*) older=(--feature-gates=KubeletCrashLoopBackOffMax=true) ;; # which maxContainerRestartPeriod is behind
esac
keep kubelet env GOGC=400 kubelet "${older[@]}" $gates --config $K/kubelet.yaml --kubeconfig $K/$name.kubeconfig --hostname-override $name --node-ip 192.0.2.$number --v=3

# --- images -------------------------------------------------------------------------
for _ in $(seq 300); do ctr version >/dev/null 2>&1 && break; sleep 0.2; done
for f in "$images"/*.tar; do
	ctr -n k8s.io images import --local "$f" >>"$log/import.log" 2>&1
done
touch "$S/ready"
# Orphans become this process's children; bash reaps them.
while :; do wait -n || sleep 1; done
