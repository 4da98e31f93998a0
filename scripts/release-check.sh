#!/usr/bin/env bash
# Makes the release twice, from copies of the sources in two places, with another
# umask, time zone, locale, home and Go cache each, and compares the bytes. A commit that is
# no release makes a draft (DRAFT=1 of release.sh), so this works at each commit.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'chmod -R u+w "$dir"; rm -rf --one-file-system "$dir"' EXIT
export DRAFT=1
one=$dir/one two=$dir/another/place/with/a/longer/name
cache=$(go env GOMODCACHE)

# What git would have of the sources as they are now.
sources() {
	mkdir -p "$1"
	git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' f; do [ ! -e "$f" ] || printf '%s\0' "$f"; done |
		tar --null -T - -c | tar -C "$1" -x --no-same-permissions
}
(umask 022 && sources "$one")
(umask 077 && sources "$two")
echo "release-check: the first"
(umask 022 && cd "$one" && TZ=Pacific/Kiritimati LC_ALL=C.UTF-8 scripts/release.sh >"$dir/log" 2>&1) || { cat "$dir/log"; exit 1; }
mkdir "$dir/home"
echo "release-check: the second, with nothing in Go's cache"
(umask 077 && cd "$two" && TZ=America/St_Johns LC_ALL=C HOME=$dir/home USER=somebody GOCACHE=$dir/cache GOMODCACHE=$cache \
	GOFLAGS=-tags=vm GOAMD64=v3 scripts/release.sh >"$dir/log" 2>&1) || { cat "$dir/log"; exit 1; }

if ! diff <(cd "$one/dist" && sha256sum -- */*) <(cd "$two/dist" && sha256sum -- */*); then
	echo "release-check: these files differ" >&2
	exit 1
fi
echo "release-check: twice the same bytes:"
cat "$two"/dist/*/SHA256SUMS
