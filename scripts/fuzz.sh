#!/usr/bin/env bash
# Runs every fuzz target for the given time each.
set -euo pipefail
for file in $(grep -rlE '^func Fuzz' --include='*_test.go' .); do
	dir=$(dirname "$file")
	for target in $(sed -nE 's/^func (Fuzz[A-Za-z0-9_]+)\(.*/\1/p' "$file"); do
		echo "fuzz: $dir $target"
		# By default a minute is spent on making each input smaller that leads to new code.
		go test -fuzzminimizetime=20x -timeout "${TIMEOUT:-60m}" -run='^$' -fuzz="^$target\$" -fuzztime="$1" "$dir"
	done
done
