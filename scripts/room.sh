#!/usr/bin/env bash
# Says what is short of room before something fails for it: room.sh MIB [DIR].
# DIR is where temporary files go, if none is given. Go builds need room in its cache too.
set -euo pipefail
export LC_ALL=C
needs=$1 dir=${2:-${TMPDIR:-/tmp}}
way="free some, or set TMPDIR to a directory on another disk"
[ $# -lt 2 ] || way="free some"
if [ ! -d "$dir" ] || ! probe=$(mktemp "$dir/.crust-room.XXXXXX"); then
	echo "room: no file can be made in $dir: $way" >&2
	exit 1
fi
rm -f "$probe"
free=$(($(df -k --output=avail "$dir" | tail -n 1) / 1024))
if [ "$free" -lt "$needs" ]; then
	echo "room: $dir has $free MiB free, and $needs MiB are needed: $way" >&2
	exit 1
fi
