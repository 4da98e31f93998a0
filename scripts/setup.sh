#!/usr/bin/env bash
# Installs what the tests and the demo need of a Debian 12 machine with Go:
# the programs of the file systems. Does nothing when all is there.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
	echo "setup: run this as root: mounting and loop devices need it" >&2
	exit 1
fi
if ! command -v go >/dev/null; then
	echo "setup: Go 1.26 or newer is needed and not on the PATH" >&2
	exit 1
fi
packages=()
need() { command -v "$1" >/dev/null || packages+=("$2"); }
export PATH=$PATH:/usr/sbin:/sbin
programs=$(go run ./deploy/filesystems packages)
while read -r program package; do need "$program" "$package"; done <<<"$programs"
need mkfs.vfat dosfstools
need mkfs.exfat exfatprogs
need mkntfs ntfs-3g
need losetup mount
need unshare util-linux
need sfdisk fdisk
need checkpolicy checkpolicy
need cpio cpio
need strace strace
need groff groff-base # reads the manual pages, in test/man
need crun crun
need pkg-config pkg-config
[ -e /usr/include/seccomp.h ] || packages+=(libseccomp-dev) # test/adversary builds a runc with it
# A static one, for containers and guests without libraries.
[ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1 || packages+=(busybox-static)
need gcc gcc
need perl perl-base
packages=($(printf '%s\n' "${packages[@]}" | sort -u))
if [ ${#packages[@]} -gt 0 ]; then
	echo "setup: installing ${packages[*]}"
	scripts/apt.sh install "${packages[@]}"
fi
names=$(go run ./deploy/filesystems names)
for fs in $names; do
	grep -qw "$fs" /proc/filesystems || modprobe "$fs" 2>/dev/null || echo "setup: this kernel has no $fs; what needs it will fail" >&2
done
[ -e /dev/loop-control ] || modprobe loop
