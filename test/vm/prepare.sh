#!/usr/bin/env bash
# Makes what the guests of `make test-vm` need, in .cache/vm: two Debian kernels
# by package name, a root image with a built SELinux policy, another policy in which
# pods can run, and an initramfs for each kernel. Does nothing that was done before.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
S=$PWD/.cache/vm
mkdir -p "$S"
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive

packages=()
need() { [ -n "$(command -v "$1")" ] || packages+=("$2"); }
need qemu-system-x86_64 qemu-system-x86
need qemu-img qemu-utils
need /usr/lib/qemu/virtiofsd qemu-system-common
need mmdebstrap mmdebstrap
need depmod kmod
need cpio cpio
need mkfs.ext4 e2fsprogs
need checkpolicy checkpolicy
need secilc secilc
if [ ${#packages[@]} -gt 0 ]; then
	echo "vm: installing ${packages[*]}"
	scripts/apt.sh install "${packages[@]}"
fi

kernel() { # name meta-package
	local dir=$S/kernel-$1 pkg
	[ "$(cat "$dir/ok" 2>/dev/null)" = "$2" ] && return
	echo "vm: fetching kernel $1"
	pkg=$(scripts/kernel-package.sh "$2")
	rm -rf "$dir" "$S/download" "$S"/root-*.img # the image has its modules
	mkdir -p "$dir" "$S/download"
	(cd "$S/download" && "$OLDPWD/scripts/apt.sh" download "$pkg")
	dpkg-deb -x "$S"/download/"$pkg"_*.deb "$dir"
	depmod -b "$dir" "$(ls "$dir/lib/modules")"
	rm -rf "$S/download"
	echo "$2" >"$dir/ok"
}
[ -e "$S/kernel-6.1/ok" ] && [ -e "$S/kernel-6.12/ok" ] || scripts/apt.sh update
# Debian's cloud kernels lack some file systems.
kernel 6.1 linux-image-amd64
kernel 6.12 linux-image-6.12-amd64

filesystems=$(go run ./deploy/filesystems packages | cut -d' ' -f2 | sort -u | paste -sd,)
guest_packages=selinux-policy-default,policycoreutils,selinux-utils,attr,acl,$filesystems,dosfstools,exfatprogs,ntfs-3g,ksmbd-tools,cifs-utils,mount,util-linux,kmod,udev,nfs-kernel-server,nfs-common,iproute2,strace,procps,psmisc,runc,crun,dmsetup
# A new list of packages makes a new image.
root=$S/root-$(echo "$guest_packages" | sha256sum | head -c 12).img
if [ ! -e "$root" ]; then
	echo "vm: making the root image (some minutes, once)"
	rm -f "$S"/root-*.img
	T=$(mktemp -d "$S/root.XXXXXX")
	trap 'rm -rf "$T"' EXIT
	# In two steps: while mmdebstrap runs, /proc is mounted in the tree.
	mmdebstrap --quiet --variant=apt --aptopt='APT::Install-Recommends "false"' --include="$guest_packages" bookworm "$T/root.tar"
	mkdir "$T/tree"
	tar -C "$T/tree" -xf "$T/root.tar"
	for k in 6.1 6.12; do
		mkdir -p "$T/tree/lib/modules"
		cp -r "$S/kernel-$k"/lib/modules/* "$T/tree/lib/modules/"
	done
	truncate -s 12G "$T/img"
	mkfs.ext4 -q -L root -d "$T/tree" "$T/img"
	mv "$T/img" "$root"
fi
ln -sfn "$(basename "$root")" "$S/root.img"

# Debian's policy, and what it lacks for pods: for tests in a guest that enforces. Its own
# semodule takes a minute in a guest, and stops at two rules of Debian's that contradict each other.
policy=$S/container-policy
if [ ! "$policy" -nt "$root" ] || [ ! "$policy" -nt test/vm/container.cil ]; then
	T3=$(mktemp -d "$S/policy.XXXXXX")
	debian=$(debugfs -R "ls -p /etc/selinux/default/policy" "$root" 2>/dev/null | grep -o 'policy\.[0-9]*')
	debugfs -R "dump /etc/selinux/default/policy/$debian $T3/debian" "$root" 2>/dev/null
	checkpolicy -M -b -C -o "$T3/debian.cil" "$T3/debian" >/dev/null
	secilc -M true -c "${debian#policy.}" -U allow -o "$T3/policy" -f /dev/null "$T3/debian.cil" test/vm/container.cil
	mv "$T3/policy" "$policy"
	rm -rf "$T3"
fi

# The guest's PID 1, and the modules that it needs to reach its root disk.
CGO_ENABLED=0 go build -o "$S/guest" ./test/vm/guest
go build -o "$S/vm" ./test/vm
for k in 6.1 6.12; do
	release=$(ls "$S/kernel-$k/lib/modules")
	T2=$(mktemp -d "$S/initramfs.XXXXXX")
	mkdir -p "$T2"/{dev,proc,sys,newroot,modules}
	cp "$S/guest" "$T2/init"
	n=10
	modprobe -d "$S/kernel-$k" -S "$release" --show-depends -a virtio_pci virtio_blk virtio_console ext4 2>/dev/null |
		awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
		cp "$file" "$T2/modules/$n-$(basename "$file")"
		n=$((n + 1))
	done
	(cd "$T2" && find . | cpio --quiet -o -H newc >"$S/initramfs-$k.new")
	mv "$S/initramfs-$k.new" "$S/initramfs-$k"
	rm -rf "$T2"
done
