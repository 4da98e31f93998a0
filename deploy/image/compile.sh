#!/usr/bin/env bash
# Compiles commands of the project as the images and releases have them, static and
# the same bytes wherever the sources lie: compile.sh ARCHITECTURE DIRECTORY/ PACKAGE...
# VERSION says what they call themselves; by default what an ordinary build does.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
arch=$1 to=$2
shift 2
# What a user has set for builds of their own would change the bytes.
GOPROXY=$(go env GOPROXY) GOSUMDB=$(go env GOSUMDB) GOMODCACHE=$(go env GOMODCACHE)
unset GOEXPERIMENT GOFIPS140 GODEBUG
export GOPROXY GOSUMDB GOMODCACHE GOFLAGS='' GOENV=off GOWORK=off CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOAMD64=v1 GOARM64=v8.0
flags='-s -w -buildid='
[ -z "${VERSION:-}" ] || flags+=" -X github.com/crust-csi/crust-csi/internal/version.number=$VERSION"
go build -trimpath -buildvcs=false -ldflags "$flags" -o "$to" "$@"
