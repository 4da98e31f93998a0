#!/usr/bin/env bash
# Compiles everything for arm64, and runs as arm64 programs, under QEMU's user
# emulation, the tests that it can run: those that mount or bind a loop device need a
# kernel of arm64 (it does not know the calls). Arguments are for `go test`.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
export GOARCH=arm64 CGO_ENABLED=0
if ! command -v qemu-aarch64-static >/dev/null; then
	scripts/apt.sh install qemu-user-static
fi
go vet -tags vm,kubernetes ./...
kernel='/(internal/(confine|linux|loopdev|microvm)|pkg/mounter)$'
packages=$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./internal/... ./pkg/... ./cmd/... | grep -vE "$kernel")
test() { go test -vet=off -count=1 -exec qemu-aarch64-static "$@"; }
# One test runs itself as a program, which this machine's kernel does not start.
test -skip '^TestALow_APodCannotNameAnotherSandbox$' "$@" $packages
# Of the others what only parses: the inputs of their fuzz targets.
test -run '^Fuzz' "$@" ./internal/linux ./internal/loopdev ./pkg/mounter
