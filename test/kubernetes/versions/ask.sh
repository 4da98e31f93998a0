#!/usr/bin/env bash
# On a node: asks what runs there what it is, "NAME: VALUE" a line.
set -euo pipefail
export LC_ALL=C
say() { echo "$1: $2"; }
node() { kubectl get node node -o "jsonpath={.status.nodeInfo.$1}"; }
say apiServer "$(kubectl version -o json | sed -n '/"serverVersion"/,$s/.*"gitVersion": "\(.*\)".*/\1/p')"
say kubelet "$(node kubeletVersion)"
say containerRuntime "$(node containerRuntimeVersion)"
say kernel "$(node kernelVersion)"
say architecture "$(node architecture)"
# Which program started each container: the shim writes it down.
for f in /run/containerd/io.containerd.runtime.v2.task/k8s.io/*/runtime; do echo "$(cat "$f")"; done | sort -u | while read -r program; do
	[ "${program##*/}" = crust-oci ] || say oci "$("$program" --version | head -1)"
done
# cgroups as the kubelet has them.
kubelet=$(cat /run/test/kubelet.pid)
kind=$(stat -fc %T "/proc/$kubelet/root/sys/fs/cgroup")
hierarchies() { # the places of a type of file system, in the kubelet's mounts
	awk -v t="$1" '{ for (i = 7; i <= NF; i++) if ($i == "-" && $(i+1) == t && $5 ~ "^/sys") print $5 }' "/proc/$kubelet/mountinfo" | sort -u
}
v1=$(hierarchies cgroup | sed 's|.*/||' | awk '$0 != "systemd"' | paste -sd ' ')
v2=$(hierarchies cgroup2 | head -1)
[ -z "$v2" ] || v2=$(cat "$v2/cgroup.controllers")
case $kind:$v2 in
cgroup2fs:*) say cgroups "v2 ($v2)" ;;
tmpfs:) say cgroups "v1 ($v1)" ;;
tmpfs:*) say cgroups "v1 ($v1), beside v2 ($v2)" ;;
esac
say features "$(kubectl get node node -o 'jsonpath={range .status.runtimeHandlers[?(@.name=="runc")].features}{@}{end}')"
pod=$(kubectl -n crust-csi get pods -l app.kubernetes.io/name=crust-csi -o name)
say driver "$(kubectl -n crust-csi exec "$pod" -c csi-node -- csi-node --version 2>&1 | head -1)"
