#!/usr/bin/env bash
# Runs the tests that depend on the kernel in a guest: the argument is its
# kernel, more arguments are for `go test`. One boot serves them all.
set -euo pipefail
cd "$(dirname "$0")/../.."
S=$PWD/.cache/vm
kernel=$1
shift
mkdir -p "$S/bin" "$S/tmp"
export CGO_ENABLED=0 CRUST_TEST_BIN=$S/bin CRUST_TEST_KERNEL=$kernel
go build -o "$S/bin/" ./cmd/csi-node ./cmd/crustctl
go build -tags failpoint -o "$S/bin/csi-nodefailpoint" ./cmd/csi-node
go build -o "$S/bin/inside" ./test/node/inside
(cd test/runtimes && CGO_ENABLED=1 go build -o "$S/bin/runc" github.com/opencontainers/runc)
[ $# -gt 0 ] || set -- -tags vm -skip "D01_Foreign|D02_Formatted|D06|D07|D08|D10|RandomCallSequences|Crustctl|AbortedWhile|ValidateCapabilities|VolumeWhoseFile" ./internal/... ./pkg/... ./test/node
# The compiled tests lie in the share.
run() {
	GOTMPDIR=$S/tmp "$S/vm" run -kernel "$kernel" \
		go test -exec "$S/vm exec" -p 1 -count=1 -timeout 20m ${TESTFLAGS:-} "$@"
}
code=0
run "$@" || code=$?
if [ "$code" -eq 3 ]; then
	# Software emulation of two processors breaks a guest's kernel now and then;
	# one that our mounts break breaks again.
	echo "the guest died: once more in a new one" >&2
	code=0
	run "$@" || code=$?
fi
exit "$code"
