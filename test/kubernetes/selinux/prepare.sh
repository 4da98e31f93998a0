#!/usr/bin/env bash
# What the guest's node needs of this machine: keys, CNI plugins, and images that
# are small and not compressed, for an emulated processor unpacks them.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../../.."
S=$PWD/.cache/kubernetes/selinux bin=$PWD/.cache/kubernetes/bin built=$PWD/.cache/image/bin
export SOURCE_DATE_EPOCH=1767225600
rm -rf "$S"
mkdir -p "$S"/{cni,images}
CRUST_KUBERNETES_STATE=$S test/kubernetes/cluster.sh keys
cp -L /usr/lib/cni/{ptp,host-local,loopback} "$S/cni/"
image() { "$built/image" -level 0 -out "$S/images/$1.tar" -name "$2" "${@:3}"; }
programs=(/sbin/mkfs.ext4 /sbin/e2fsck)
files=()
for f in "${programs[@]}" $(ldd "${programs[@]}" | grep -o '/lib[^ :]*' | sort -u); do files+=("$f=$f"); done
image csi-node localhost/crust-csi/csi-node:dev -entrypoint /usr/local/bin/csi-node "$built/$(go env GOARCH)/csi-node=/usr/local/bin/csi-node" "${files[@]}" /etc/mke2fs.conf=/etc/mke2fs.conf=644
name=$(sed -n 's|.*image: \(.*/csi-provisioner:.*\)|\1|p' deploy/kubernetes/base/sidecars.yaml)
image csi-provisioner "$name" -entrypoint /csi-provisioner "$bin/csi-provisioner=/csi-provisioner"
cp .cache/image/{busybox,pause}.tar "$S/images/"
