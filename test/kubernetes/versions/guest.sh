#!/usr/bin/env bash
# What a guest's node needs of this machine, in .cache/kubernetes/versions/guest: keys, CNI plugins, and images that
# are not compressed, for an emulated processor unpacks them.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../../.."
G=$PWD/.cache/kubernetes/versions/guest bin=$PWD/.cache/kubernetes/bin
export SOURCE_DATE_EPOCH=1767225600
test/vm/prepare.sh
rm -rf "$G"/{cni,pki}
mkdir -p "$G"/{cni,images}
CRUST_KUBERNETES_STATE=$G test/kubernetes/cluster.sh keys
cp -L /usr/lib/cni/{ptp,host-local,loopback} "$G/cni/"
cp -u .cache/image/base-*.root "$G/images/"
OUT=$G/images LEVEL=0 VERSION=${VERSION:-$(cat internal/version/VERSION)-dev} deploy/image/build.sh
for s in provisioner resizer snapshotter; do
	name=$(sed -n "s|.*image: \(.*/csi-$s:.*\)|\1|p" deploy/kubernetes/base/*.yaml)
	"$G/images/bin/image" -level 0 -out "$G/images/csi-$s.tar" -name "$name" -entrypoint "/csi-$s" "$bin/csi-$s=/csi-$s"
done
cp .cache/image/{busybox,pause}.tar "$G/images/"
