#!/usr/bin/env bash
# Builds the programs of the releases in test/skew/releases, out of git, for tests of them beside
# today's: .cache/skew/VERSION has the programs, their sources, the commit, and the kinds of records that
# the release writes. Does nothing that was done before. A release that lacks one of the programs is built again.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
mkdir -p .cache/skew
exec 9>.cache/skew/lock
flock 9
case $(uname -m) in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; *) arch=$(uname -m) ;; esac
programs=(csi-node csi-steward crustctl crustd crust-agent crust-guest)
# complete DIRECTORY COMMIT: it has all programs of that commit.
complete() {
	[ "$(cat "$1/commit" 2>/dev/null)" = "$2" ] || return 1
	local p
	for p in "${programs[@]}"; do [ -e "$1/$p" ] || return 1; done
}
while read -r version commit; do
	out=$PWD/.cache/skew/$version
	! complete "$out" "$commit" || continue
	if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
		echo "releases: the commit $commit of $version is not in this clone. Fetch the whole history (git fetch --unshallow)," \
			"or copy .cache/skew/$version from a clone that has it." >&2
		exit 1
	fi
	echo "releases: building the programs of $version"
	rm -rf "$out"
	mkdir -p "$out/source"
	git archive "$commit" | tar -x -C "$out/source"
	# As the release makes them.
	VERSION=${version#v} "$out/source/deploy/image/compile.sh" "$arch" "$out/" "${programs[@]/#/./cmd/}"
	grep -rhoP 'record\.Type\{Kind: "\K[^"]+' --include='*.go' --exclude='*_test.go' "$out/source" | sort >"$out/kinds"
	echo "$commit" >"$out/commit"
done < <(grep -v '^#' test/skew/releases)
