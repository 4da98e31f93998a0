#!/usr/bin/env bash
# Makes the files of a release in dist/vVERSION: see docs/release.md. The version is
# that of internal/version/VERSION, the date of all files that of its section in the
# CHANGELOG. The Debian packages are those of today. It refuses sources with changes that
# are not in that section; with DRAFT=1 it makes them as VERSION-dev, which is no release.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC
built=$PWD/.cache/release
rm -rf "$built"
mkdir -p "$built"
go build -C deploy/release -o "$built/write" .
draft=()
[ "${DRAFT:-}" != 1 ] || draft=(-draft)
plan=$("$built/write" -project . -plan "${draft[@]}") || { rm -r "$built"; exit 1; }
read -r version SOURCE_DATE_EPOCH <<<"$plan"
out=$PWD/dist/v$version
export SOURCE_DATE_EPOCH
rm -rf "$out"
mkdir -p "$out"

OUT=$built TAG=v$version VERSION=$version ARCHES="amd64 arm64" LEVEL=9 deploy/image/build.sh
for arch in amd64 arm64; do
	mv "$built"/base-*-$arch.root "$built/base-$arch.tar"
	VERSION=$version deploy/image/compile.sh $arch "$built/bin/$arch/" ./cmd/...
done
"$built/write" -version "$version" -project . -built "$built" -out "$out"
rm -r "$built" # every release has the packages of its day
(cd "$out" && sha256sum -c --quiet SHA256SUMS && ls -l --time-style=+)
