#!/usr/bin/env bash
# Builds the guest of pods in microVMs, in .cache/guest/pod-initramfs: the guest of scripts/guest.sh, and this machine's runc with its
# libraries and the modules of a network device, of nftables and of overlayfs. Installs what such pods need on this machine: passt,
# virtiofsd, and a runtime for the host.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
S=$PWD/.cache/guest
export PATH=$PATH:/usr/sbin:/sbin
scripts/guest.sh
exec 9>"$S/pod-lock"
flock 9
packages=()
[ -n "$(command -v passt)" ] || packages+=(passt)
[ -n "$(command -v runc)" ] || packages+=(runc)
[ -x /usr/lib/qemu/virtiofsd ] || packages+=(qemu-system-common)
if [ ${#packages[@]} -gt 0 ]; then
	echo "pod-guest: installing ${packages[*]}"
	scripts/apt.sh install "${packages[@]}"
fi
release=$(ls "$S/kernel/lib/modules")
T=$(mktemp -d "$S/pod-initramfs.XXXXXX")
trap 'rm -rf "$T"' EXIT
mkdir -p "$T/bin" "$T/modules" "$T/run" "$T/sys/fs"
runc=$(command -v runc)
cp "$runc" "$T/bin/runc"
{ ldd "$runc" || true; } | { grep -o '/[^ ]*' || true; } | while read -r library; do
	mkdir -p "$T$(dirname "$library")"
	cp -L "$library" "$T$library"
done
n=50
for file in $(modprobe -d "$S/kernel" -S "$release" --show-depends -a virtio_net overlay nf_tables 2>/dev/null | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'); do
	cp "$file" "$T/modules/$n-$(basename "$file")"
	n=$((n + 1))
done
# What it can mount, for crustd to know before a guest has run.
systems=()
for name in $(go run ./deploy/filesystems names); do
	if [ -n "$(modprobe -d "$S/kernel" -S "$release" --show-depends "$name" 2>/dev/null)" ]; then systems+=("\"$name\""); fi
done
(IFS=, && echo "{\"kernel\": \"$release\", \"fileSystems\": [${systems[*]}]}") >"$S/guest.json.new"
mv "$S/guest.json.new" "$S/guest.json"
# The kernel unpacks one archive after the other.
(cd "$T" && find . | cpio --quiet -o -H newc) | cat "$S/initramfs" - >"$S/pod-initramfs.new"
mv "$S/pod-initramfs.new" "$S/pod-initramfs"
