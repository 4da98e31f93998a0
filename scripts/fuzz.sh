#!/usr/bin/env bash
# Runs every fuzz target for the given time each.
set -euo pipefail
export LC_ALL=C
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for file in $(git ls-files -z --cached --others --exclude-standard '*_test.go' | xargs -0 grep -lE '^func Fuzz'); do
	dir=./$(dirname "$file")
	for target in $(sed -nE 's/^func (Fuzz[A-Za-z0-9_]+)\(.*/\1/p' "$file"); do
		echo "fuzz: $dir $target"
		for try in 1 2 3; do
			status=0
			# By default a minute is spent on making each input smaller that leads to new code.
			go test -fuzzminimizetime=20x -timeout "${TIMEOUT:-60m}" -run='^$' -fuzz="^$target\$" -fuzztime="$1" "$dir" >"$log" 2>&1 || status=$?
			# The end of the time itself is a failure now and then, with this line and nothing else
			# (golang/go#75804, mended in Go 1.27). An input that fails is written down and named.
			if [ "$status" = 0 ] || ! grep -qx '    context deadline exceeded' "$log" || grep -q 'Failing input' "$log"; then
				break
			fi
			echo "fuzz: $target was ended by its time (golang/go#75804); try $try of 3"
		done
		cat "$log"
		[ "$status" = 0 ] || exit "$status"
	done
done
