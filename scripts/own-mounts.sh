#!/bin/sh
# Runs a command in its own mount namespace, for go test -exec. Its mounts are shared as on a node,
# but not with the host: a sandbox of one package's tests does not copy another package's mounts.
export LC_ALL=C
exec unshare --mount --propagation private sh -c 'mount --make-rshared / && exec "$@"' sh "$@"
