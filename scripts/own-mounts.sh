#!/bin/sh
# Runs a command in its own mount namespace, for go test -exec. Its mounts are shared as on a node,
# but not with the host: a sandbox of one package's tests does not copy another package's mounts.
# A file system that is frozen when the command is killed is thawed: it would keep every sync(2) of this machine waiting for ever.
export LC_ALL=C
# shellcheck disable=SC2016
exec unshare --mount --propagation private sh -c '
mount --make-rshared /
setsid sh -c '\''
	tail -f --pid="$1" /dev/null
	awk "\$3 ~ /^7:/ { print \$5 }" /proc/self/mountinfo | while read -r at; do fsfreeze -u "$at"; done
'\'' sh $$ </dev/null >/dev/null 2>&1 &
exec "$@"' sh "$@"
