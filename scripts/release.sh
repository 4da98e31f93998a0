#!/usr/bin/env bash
# Makes the files of a release in dist/vVERSION: see docs/release.md. The version is
# that of internal/version/VERSION, the date of all files that of its section in the
# CHANGELOG. The Debian packages are those of today.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC
version=$(cat internal/version/VERSION)
day=$(sed -nE "s/^## v${version//./\\.} - ([0-9]{4}-[0-9]{2}-[0-9]{2})$/\1/p" CHANGELOG.md)
if [ -z "$day" ]; then
	echo "release: CHANGELOG.md has no line \"## v$version - YEAR-MONTH-DAY\"" >&2
	exit 1
fi
SOURCE_DATE_EPOCH=$(date -d "$day" +%s)
out=$PWD/dist/v$version built=$PWD/.cache/release
export SOURCE_DATE_EPOCH
rm -rf "$out" "$built"
mkdir -p "$out" "$built"

OUT=$built TAG=v$version VERSION=$version ARCHES="amd64 arm64" LEVEL=9 deploy/image/build.sh
for arch in amd64 arm64; do
	mv "$built"/base-*-$arch.root "$built/base-$arch.tar"
	VERSION=$version deploy/image/compile.sh $arch "$built/bin/$arch/" ./cmd/...
done
go build -C deploy/release -o "$built/write" .
"$built/write" -version "$version" -project . -built "$built" -out "$out"
rm -r "$built" # every release has the packages of its day
(cd "$out" && sha256sum -c --quiet SHA256SUMS && ls -l --time-style=+)
