#!/usr/bin/env bash
# Runs the tests with both kernels at once: a guest's two processors seldom have
# work at the same time. Their output comes one after the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
pids=()
# Also those that still run when this is interrupted.
trap 'kill "${pids[@]}" 2>/dev/null; wait; rm -rf "$out"' EXIT
kernels=(6.1 6.12)
for k in "${kernels[@]}"; do
	test/vm/tests.sh "$k" >"$out/$k" 2>&1 &
	pids+=($!)
done
code=0
for i in "${!kernels[@]}"; do
	wait "${pids[$i]}" || code=1
	echo "=== Linux ${kernels[$i]}"
	cat "$out/${kernels[$i]}"
done
exit "$code"
