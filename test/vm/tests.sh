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
go build -o "$S/bin/csi-node" ./cmd/csi-node
go build -tags failpoint -o "$S/bin/csi-nodefailpoint" ./cmd/csi-node
go build -o "$S/bin/inside" ./test/node/inside
(cd test/runtimes && CGO_ENABLED=1 go build -o "$S/bin/runc" github.com/opencontainers/runc)
[ $# -gt 0 ] || set -- -tags vm -skip "D01_Foreign|D02_Formatted|D06|D07|RandomCallSequences" ./internal/... ./pkg/... ./test/node
# The compiled tests lie in the share.
GOTMPDIR=$S/tmp "$S/vm" run -kernel "$kernel" \
	go test -exec "$S/vm exec" -p 1 -count=1 -timeout 20m ${TESTFLAGS:-} "$@"
