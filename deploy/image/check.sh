#!/usr/bin/env bash
# Looks whether the programs that csi-node runs start in a base of its image, and
# whether dpkg knows the packages:
#
#	check.sh ARCHITECTURE BASE.tar
#
# Another architecture's are run by QEMU's user emulation.
set -euo pipefail
arch=$1 base=$2
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive
run=()
if [ "$arch" != "$(dpkg --print-architecture)" ]; then
	declare -A names=([amd64]=x86_64 [arm64]=aarch64)
	emulator=qemu-${names[$arch]}-static
	command -v "$emulator" >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends qemu-user-static >/dev/null; }
	run=(/emulator)
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
tar -C "$root" -xf "$base"
[ ${#run[@]} = 0 ] || cp "$(command -v "$emulator")" "$root/emulator"
inside() { unshare -m --propagation private sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" "${run[@]}" "$@"; }

truncate -s 512M "$root/tmp/"{ext4,xfs,btrfs}
try() {
	local said
	if ! said=$(inside "$@" 2>&1); then
		echo "check: $arch: $*: $said" >&2
		exit 1
	fi
}
try /sbin/mkfs.ext4 -q -F /tmp/ext4
try /sbin/e2fsck -f -p /tmp/ext4
truncate -s 768M "$root/tmp/ext4"
try /sbin/resize2fs /tmp/ext4
try /sbin/mkfs.xfs -q -f /tmp/xfs
try /sbin/xfs_repair -n /tmp/xfs
try /sbin/mkfs.btrfs -q -f /tmp/btrfs
try /bin/btrfs check --readonly /tmp/btrfs
try /bin/btrfstune -m /tmp/btrfs
try /sbin/modprobe --version
try /bin/sh -c 'exit 0'
for name in $(cat "$(dirname "$0")/packages"); do
	try /usr/bin/dpkg-query -W "$name"
done
# Every file of every package is there and as it was packed, but for what base.sh takes away.
away='^missing +/usr/share/(doc|man|locale|info)(/|$)'
wrong=$({ inside /usr/bin/dpkg --audit && inside /usr/bin/dpkg --verify; } 2>&1 | grep -vE "$away" || true)
if [ -n "$wrong" ]; then
	echo "check: $arch: $wrong" >&2
	exit 1
fi
echo "check: $arch: the programs start, $(grep -c '^Package: ' "$root/var/lib/dpkg/status") packages"
