#!/usr/bin/env bash
# Gets Prometheus and promtool of Debian 12, for the tests of deploy/monitoring, and
# builds tools/promql. The package is unpacked and not installed: installed, it would start a
# service.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
to=$PWD/.cache/monitoring
if [ ! -x "$to/prometheus" ] || [ ! -x "$to/promtool" ]; then
	rm -rf "$to"
	mkdir -p "$to"
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	chmod 755 "$tmp"
	echo "monitoring: getting prometheus"
	scripts/apt.sh update
	(cd "$tmp" && "$OLDPWD/scripts/apt.sh" download prometheus && dpkg-deb -x prometheus_*.deb unpacked)
	mv "$tmp/unpacked/usr/bin/promtool" "$tmp/unpacked/usr/bin/prometheus" "$to/"
fi
go build -C tools/promql -o "$to/promql" .
