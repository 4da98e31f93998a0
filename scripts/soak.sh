#!/usr/bin/env bash
# Runs what attacks the driver, round after round, for so many hours: the storm of
# callers, random kills, the suite that runs as a pod, random sequences of calls,
# guests that attack, fuzz targets, and sick disks in a guest with Linux 6.12.
# A round that has begun is finished. Ends at the first failure, with its output.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
hours=$1
end=$((SECONDS + hours * 3600))
out=$(mktemp)
trap 'rm -f "$out"' EXIT
round=0

# attack NAME COMMAND...
attack() {
	local name=$1 begin=$SECONDS
	shift
	if ! "$@" >"$out" 2>&1; then
		cat "$out"
		echo "soak: $name failed in round $round"
		exit 1
	fi
	echo "soak: round $round, $name: ok ($((SECONDS - begin)) s)"
}
run() { go test -count=1 -timeout "${TIMEOUT:-60m}" "$@"; }
storm() { CRUST_STORM_SECONDS=600 run ./test/storm; }
kills() { run -run 'D06|RandomCallSequences|NothingEverGetsShorter' ./test/node; }

test/vm/prepare.sh
while [ "$SECONDS" -lt "$end" ]; do
	round=$((round + 1))
	attack "storm" storm
	attack "kills, errors and hangs at every step" kills
	attack "a pod that attacks" run ./test/adversary
	attack "every step of crustd and its agents" run -run EveryStep ./test/crust
	attack "guests that attack" run -run AGuest ./test/crust
	attack "fuzz" scripts/fuzz.sh 30s
	attack "sick disks" test/vm/tests.sh 6.12 -tags vm -run TestD11 ./test/node
done
echo "soak: $round rounds in $hours hours"
