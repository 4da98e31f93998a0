#!/usr/bin/env bash
# Builds the OCI images of the project, as archives in .cache/image, without a
# container daemon: localhost/crust-csi/{csi-node,csi-steward,crustd,crust-agent}:TAG, and crustd-vm. Load one with
# `ctr -n k8s.io images import`, `skopeo copy oci-archive:...` or `crane push`.
# Variables: TAG (dev), VERSION, ARCHES ("amd64 arm64"; this machine's), OUT (the directory), LEVEL
# (of compression). The same sources and Debian packages give the same bytes.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
out=${OUT:-$PWD/.cache/image}
tag=${TAG:-dev}
arches=${ARCHES:-$(go env GOARCH)}
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1767225600}
mkdir -p "$out/bin"
guest=$PWD/.cache/guest

# A new list of packages, or another way to make it, makes a new base.
packages=$(deploy/image/packages.sh)
state=$({ echo "$packages" && cat deploy/image/base.sh; } | sha256sum | head -c 12)
for base in "$out"/base-*.root; do
	[[ $base = *-$state-* ]] || rm -f "$base"
done
for arch in $arches; do
	base=$out/base-$state-$arch.root
	if [ ! -e "$base" ]; then
		command -v mmdebstrap >/dev/null || scripts/apt.sh install mmdebstrap
		echo "image: making the base of Debian packages for $arch (half a minute, once)"
		deploy/image/base.sh "$arch" "$base.tar"
		deploy/image/check.sh "$arch" "$base.tar"
		mv "$base.tar" "$base"
	fi
done

go build -C deploy/image -o "$out/bin/image" .
commands=(csi-node csi-steward crustctl crustd crust-oci crust-agent)
for arch in $arches; do
	mkdir -p "$out/bin/$arch"
	deploy/image/compile.sh "$arch" "$out/bin/$arch/" "${commands[@]/#/./cmd/}"
done
image() { echo "image: $2"; "$out/bin/image" -level "${LEVEL:-1}" -arch "${arches// /,}" -out "$out/$1.tar" -name "$2" "${@:3}"; }
to() { for c in "$@"; do entries+=("{arch}/$c=/usr/local/bin/$c"); done; }
cd "$out/bin"
entries=() && to csi-node crustctl
image csi-node "localhost/crust-csi/csi-node:$tag" -base "$out/base-$state-{arch}.root" -entrypoint /usr/local/bin/csi-node "${entries[@]}"
entries=() && to csi-steward
image csi-steward "localhost/crust-csi/csi-steward:$tag" -entrypoint /usr/local/bin/csi-steward "${entries[@]}"
entries=() && to crustd crust-oci crustctl
image crustd "localhost/crust-csi/crustd:$tag" -entrypoint /usr/local/bin/crustd "${entries[@]}"
# The guest is there after make pod-guest, and for amd64 only.
if [ "$arches" = amd64 ] && [ -e "$guest/pod-initramfs" ]; then
	entries=() && to crustd crust-oci crustctl
	for f in vmlinuz pod-initramfs guest.json; do entries+=("$guest/$f=/usr/local/share/crust-guest/$f=644"); done
	image crustd-vm "localhost/crust-csi/crustd-vm:$tag" -entrypoint /usr/local/bin/crustd "${entries[@]}"
else
	rm -f "$out/crustd-vm.tar"
	echo "image: no crustd-vm, which needs ARCHES=amd64 and what make pod-guest builds"
fi
entries=() && to crust-agent
image crust-agent "localhost/crust-csi/crust-agent:$tag" -entrypoint /usr/local/bin/crust-agent "${entries[@]}"
