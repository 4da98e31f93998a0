#!/usr/bin/env bash
# Looks whether the programs that csi-node runs start in a base of its image, and
# whether dpkg knows the packages:
#
#	check.sh ARCHITECTURE BASE.tar
#
# Another architecture's are run by QEMU's user emulation.
set -euo pipefail
export LC_ALL=C
arch=$1 base=$2
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive
run=()
if [ "$arch" != "$(dpkg --print-architecture)" ]; then
	declare -A names=([amd64]=x86_64 [arm64]=aarch64)
	emulator=qemu-${names[$arch]}-static
	command -v "$emulator" >/dev/null || "$(dirname "$0")/../../scripts/apt.sh" install qemu-user-static
	run=(/emulator)
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
tar -C "$root" -xf "$base"
[ ${#run[@]} = 0 ] || cp "$(command -v "$emulator")" "$root/emulator"
inside() { unshare -m --propagation private sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" "${run[@]}" "$@"; }

try() {
	local said code=0
	said=$(inside "$@" 2>&1) || code=$?
	if [ "$code" != 0 ]; then
		echo "check: $arch: $*: exit status $code: $said" >&2
		exit 1
	fi
}
# program NAME: its path in the base. An emulator does not search PATH.
program() {
	local dir
	for dir in /usr/sbin /usr/bin /sbin /bin; do
		if [ -e "$root$dir/$1" ] || [ -L "$root$dir/$1" ]; then
			echo "$dir/$1"
			return
		fi
	done
	echo "check: $arch: the base has no $1" >&2
	return 1
}
tries=$(cd "$(dirname "$0")/../.." && go run ./deploy/filesystems tries /tmp/)
while read -r -a argv; do
	file=$root${argv[-1]}
	[ -e "$file" ] || truncate -s 512M "$file"
	case ${argv[0]} in
	grow) truncate -s 768M "$file" ;;
	*)
		argv[0]=$(program "${argv[0]}")
		try "${argv[@]}" </dev/null
		;;
	esac
done <<<"$tries"
try /sbin/modprobe --version
try /bin/sh -c 'exit 0'
packages=$("$(dirname "$0")/packages.sh")
for name in $packages; do
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
