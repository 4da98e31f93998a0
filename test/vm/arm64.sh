#!/usr/bin/env bash
# Runs the tests of what meets the kernel, on Debian's arm64 kernel in an emulated
# machine: system calls, loop devices, mounts and confined programs. Everything is in
# the guest's memory.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH=1767225600
packages=()
need() { [ -n "$(command -v "$1")" ] || packages+=("$2"); }
need qemu-system-aarch64 qemu-system-arm
need mmdebstrap mmdebstrap
need depmod kmod
need cpio cpio
if [ ${#packages[@]} -gt 0 ]; then
	scripts/apt.sh install "${packages[@]}"
fi
S=$PWD/.cache/arm64
mkdir -p "$S"
more=linux-image-arm64,busybox-static,procps,psmisc,attr
# Another list of packages, or another way to make it, makes a new base.
packages=$(deploy/image/packages.sh)
base=$S/base-$({ echo "$more $packages" && cat deploy/image/base.sh; } | sha256sum | head -c 12).tar
if [ ! -e "$base" ]; then
	echo "arm64: making the guest's root of Debian packages (half a minute, once)"
	rm -f "$S"/base-*.tar
	deploy/image/base.sh arm64 "$S/base.tar" "$more"
	mv "$S/base.tar" "$base"
fi
T=$(mktemp -d "$S/run.XXXXXX")
trap 'rm -rf --one-file-system "$T"' EXIT
root=$T/root
mkdir "$root"
tar -C "$root" -xf "$base"
release=$(ls "$root/lib/modules")
mv "$root/boot/vmlinuz-$release" "$T/vmlinuz"
rm -rf "$root"/boot "$root"/usr/share/{doc,zoneinfo,i18n,perl} "$root"/usr/lib/python3*
# Debian's cloud kernel lacks some file systems. What this one has for all kinds of hardware would take the guest's memory.
find "$root/lib/modules/$release/kernel/drivers" -mindepth 1 -maxdepth 1 ! -name block ! -name dax ! -name md -exec rm -r {} +
rm -r "$root/lib/modules/$release/kernel/sound"
depmod -b "$root" "$release"
go run ./deploy/filesystems names >"$root/filesystems"

export GOARCH=arm64 CGO_ENABLED=0
tests=(internal/linux internal/loopdev internal/confine pkg/mounter)
for dir in "${tests[@]}"; do
	mkdir -p "$root/t/$dir"
	go test -c -vet=off -tags vm -ldflags '-s -w' -o "$root/t/$dir/test" "./$dir"
done
# A root that programs can be confined in is none that the kernel began with.
cat >"$root/init" <<'GUEST'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
if [ "$1" != inside ]; then
	mkdir /new && mount -t tmpfs -o size=80% root /new
	for e in /*; do [ "$e" = /new ] || cp -a "$e" /new/; done
	exec busybox switch_root /new /init inside
fi
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev
mount -t tmpfs -o mode=1777 tmp /tmp && mount -t tmpfs run /run && mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm && mount -t devpts devpts /dev/pts
busybox ip link set lo up
for m in loop $(cat /filesystems); do modprobe $m; done
echo "arm64: Linux $(uname -r) $(uname -m), pages of $(getconf PAGE_SIZE) bytes"
for dir in internal/linux internal/loopdev internal/confine pkg/mounter; do
	cd /t/$dir
	./test -test.v -test.timeout 20m
	echo "arm64: $dir: $?"
done
busybox poweroff -f
GUEST
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc >"$T/initramfs")
rm -rf "$root"
log=$S/console
timeout 3600 qemu-system-aarch64 -M virt -cpu max,pauth-impdef=on -smp 2 -m 4G -nodefaults -no-user-config -display none -no-reboot \
	-kernel "$T/vmlinuz" -initrd "$T/initramfs" -append 'console=ttyAMA0 quiet panic=-1' -serial "file:$log"
tr -d '\r' <"$log" | grep -vE '^ *=== '
for dir in "${tests[@]}"; do
	tr -d '\r' <"$log" | grep -qx "arm64: $dir: 0" || { echo "arm64: $dir failed; $log has the rest" >&2; exit 1; }
done
