#!/usr/bin/env bash
# Uses Debian's packages. A new machine updates itself in its first minutes, and apt refuses a second user: this waits.
#
#	apt.sh update
#	apt.sh install PACKAGE...     with new lists
#	apt.sh download PACKAGE...    into the working directory
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
output=$(mktemp)
trap 'rm -f "$output"' EXIT
# The timeout is for dpkg's lock only: apt never waits for that of its lists.
get() {
	local begin=$SECONDS waits=
	until apt-get -o DPkg::Lock::Timeout=900 -o Acquire::Retries=3 -qq "$@" >"$output" 2>&1; do
		if ! grep -q 'Could not get lock' "$output" || [ $((SECONDS - begin)) -ge 900 ]; then
			cat "$output" >&2
			return 1
		fi
		[ -n "$waits" ] || echo "apt: waiting until another process has finished: $(grep -m 1 'Could not get lock' "$output")" >&2
		waits=yes
		sleep 1
	done
}
case ${1:-} in
update) get update ;;
install)
	get update
	get install -y --no-install-recommends "${@:2}"
	;;
download) get -o APT::Sandbox::User=root download "${@:2}" ;;
*) sed -n '2,6s/^# \?//p' "$0" >&2 && exit 2 ;;
esac
