#!/usr/bin/env bash
# Makes the root directory that an image begins with: Debian's essential packages,
# those of packages.sh (and others), and what they need, as an archive:
#
#	base.sh ARCHITECTURE FILE.tar [PACKAGE,...]
#
# Packages are unpacked and their scripts are not run: so the base of another
# architecture needs no emulator, and nothing of this machine gets in. What the
# scripts would make, and a file system's programs need, is made here. The same
# versions of the packages give the same bytes.
set -euo pipefail
out=$(realpath -m "$2")
cd "$(dirname "$0")"
export LC_ALL=C TZ=UTC PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH
umask 022

# With "root DIR" it is mmdebstrap's hook, after the packages were unpacked.
if [ "$1" = root ]; then
	cd "$out"
	db=var/lib/dpkg
	# What scanners and `dpkg -l` read. The contents of a package: as dpkg has it.
	for deb in var/cache/apt/archives/*.deb; do
		control=$(mktemp -d)
		dpkg-deb -e "$deb" "$control"
		name=$(dpkg-deb -f "$deb" Package)
		sed "s/^Package: .*/&\nStatus: install ok installed/" "$control/control"
		if [ -e "$control/conffiles" ]; then
			echo Conffiles:
			while read -r file; do echo " $file $(md5sum <".$file" | cut -d' ' -f1)"; done <"$control/conffiles"
		fi
		echo
		[ "$(dpkg-deb -f "$deb" Multi-Arch)" != same ] || name+=:$(dpkg-deb -f "$deb" Architecture)
		dpkg-deb --fsys-tarfile "$deb" | tar -t | sed -e 's|^\./|/|' -e 's|\(.\)/$|\1|' -e 's|^/$|/.|' >"$db/info/$name.list"
		[ ! -e "$control/md5sums" ] || cp "$control/md5sums" "$db/info/$name.md5sums"
		rm -r "$control"
	done >"$db/status"
	echo 1 >"$db/info/format" # that names of lists have the architecture
	cp usr/share/base-passwd/passwd.master etc/passwd
	cp usr/share/base-passwd/group.master etc/group
	cp usr/share/libc-bin/nsswitch.conf etc/nsswitch.conf
	ln -sf ../proc/self/mounts etc/mtab
	# Names of this machine, and what nobody reads in an image. Licences stay.
	rm -f etc/hostname etc/resolv.conf
	rm -rf usr/share/man usr/share/locale usr/share/info
	find usr/share/doc -mindepth 1 ! -type d ! -name copyright -delete
	find usr/share/doc -mindepth 1 -type d -empty -delete
	exit
fi

arch=$1
packages=$(./packages.sh | paste -sd,)
links='bin sbin lib'
[ "$arch" != amd64 ] || links+=' lib64'
mmdebstrap --quiet --arch="$arch" --variant=extract --aptopt='APT::Install-Recommends "false"' \
	--setup-hook="cd \"\$1\" && for d in $links; do mkdir -p usr/\$d && ln -s usr/\$d \$d; done" \
	--extract-hook="'$PWD/base.sh' root \"\$1\"" \
	--include='?essential' --include=usr-is-merged --include="$packages${3:+,$3}" bookworm "$out"
