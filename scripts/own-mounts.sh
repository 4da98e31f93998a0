#!/bin/sh
# Runs a command in a mount namespace of its own, whose mounts propagate as on a
# node: for go test -exec. What one package mounts is not in the sandboxes of another.
export LC_ALL=C
exec unshare --mount --propagation private sh -c 'mount --make-rshared / && exec "$@"' sh "$@"
