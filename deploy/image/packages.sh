#!/usr/bin/env bash
# Prints the Debian packages of csi-node's image, one a line: those in the file packages, and those with the programs of
# file systems, from the table of pkg/mounter/fstype.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
rows=$(go run ./deploy/filesystems packages)
{ cat deploy/image/packages && cut -d' ' -f2 <<<"$rows"; } | sort -u
