#!/usr/bin/env bash
# Builds a small guest for `crustctl sandbox run` and the tests, in .cache/guest:
# Debian's cloud kernel by package name, and an initramfs that holds crust-guest as
# its PID 1, busybox, and the modules for its disks and file systems. Does nothing
# that was done before.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
S=$PWD/.cache/guest
mkdir -p "$S"
exec 9>"$S/lock" # two at once would move each other's files away
flock 9
export PATH=$PATH:/usr/sbin:/sbin
packages=()
need() { [ -n "$(command -v "$1")" ] || packages+=("$2"); }
need qemu-system-x86_64 qemu-system-x86
need depmod kmod
need cpio cpio
[ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1 || packages+=(busybox-static)
if [ ${#packages[@]} -gt 0 ]; then
	echo "guest: installing ${packages[*]}"
	scripts/apt.sh install "${packages[@]}"
fi
if [ ! -e "$S/kernel/ok" ]; then
	echo "guest: fetching a kernel"
	scripts/apt.sh update
	pkg=$(scripts/kernel-package.sh linux-image-cloud-amd64)
	rm -rf "$S/kernel" "$S/download"
	mkdir -p "$S/kernel" "$S/download"
	(cd "$S/download" && "$OLDPWD/scripts/apt.sh" download "$pkg")
	dpkg-deb -x "$S"/download/"$pkg"_*.deb "$S/kernel"
	depmod -b "$S/kernel" "$(ls "$S/kernel/lib/modules")"
	rm -rf "$S/download"
	touch "$S/kernel/ok"
fi
release=$(ls "$S/kernel/lib/modules")
cp "$S/kernel/boot/vmlinuz-$release" "$S/vmlinuz.new" # a test may begin to boot it
mv "$S/vmlinuz.new" "$S/vmlinuz"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$S/crust-guest" ./cmd/crust-guest

T=$(mktemp -d "$S/initramfs.XXXXXX")
trap 'rm -rf "$T"' EXIT
mkdir -p "$T"/{dev,proc,sys,run,tmp,bin,sbin,modules,etc}
cp "$S/crust-guest" "$T/init"
cp /bin/busybox "$T/bin/busybox"
for a in sh cat ls mount umount mkdir rmdir rm cp mv ln touch dd sync sha256sum stat df id date sleep dmesg find head tail grep wc od printf chmod chown kill ps true false seq tee; do
	ln -s busybox "$T/bin/$a"
done
ln -s ../bin/busybox "$T/sbin/modprobe"
files() { modprobe -d "$S/kernel" -S "$release" --show-depends -a "$@" 2>/dev/null | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'; }
# What it needs to be reached and to have disks, in order.
n=10
for file in $(files virtio_pci virtio_mmio virtio_console virtio_scsi sd_mod); do
	cp "$file" "$T/modules/$n-$(basename "$file")"
	n=$((n + 1))
done
# File systems are loaded when they are mounted. Debian's cloud kernel lacks some.
names=$(go run ./deploy/filesystems names)
for file in $(files $names vfat virtiofs crc32c_generic vsock_loopback vmw_vsock_virtio_transport); do
	to=$T/lib/modules/$release/${file#*"/lib/modules/$release/"}
	mkdir -p "$(dirname "$to")"
	cp "$file" "$to"
done
mkdir -p "$T/lib/modules/$release"
cp "$S/kernel/lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$T/lib/modules/$release/" 2>/dev/null || true
depmod -b "$T" "$release"
(cd "$T" && find . | cpio --quiet -o -H newc >"$S/initramfs.new")
mv "$S/initramfs.new" "$S/initramfs"
