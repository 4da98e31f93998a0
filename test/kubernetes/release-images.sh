#!/usr/bin/env bash
# The images of the releases that the chart's upgrade begins with, from the releases' own sources.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
out=$PWD/.cache/image
export SOURCE_DATE_EPOCH=1767225600
for source in .cache/skew/*/source; do
	# The commit of v0.1.0 has the chart's links as files with the links' targets.
	for f in "$source"/deploy/helm/crust-csi/files/*.yaml; do
		if [ ! -L "$f" ] && to=$(cat "$f") && [[ $to = ../* ]] && [ -e "${f%/*}/$to" ]; then ln -sfn "$to" "$f"; fi
	done
	version=$(basename "$(dirname "$source")") to=$out/$(basename "$(dirname "$source")")
	[ "$(cat "$to/commit" 2>/dev/null)" != "$(cat "$source/../commit")" ] || continue
	mkdir -p "$to"
	cp -l "$out"/base-*.root "$to/" 2>/dev/null || true # the same packages
	TAG=$version VERSION=${version#v} OUT=$to "$source/deploy/image/build.sh"
	cp "$source/../commit" "$to/commit"
done
