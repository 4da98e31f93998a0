#!/usr/bin/env bash
# Runs tests on a cluster of one node and asks what was there: row.sh REGEX. On this machine or in a guest; the
# environment is what ../cluster.sh takes. `go test -v`'s words, then ask.sh's behind a line "ASKED".
set -uo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
export CRUST_KUBERNETES_NODES=1 CRUST_KUBERNETES_KEEP=1 PATH=$PATH:/usr/sbin:/sbin
S=$CRUST_KUBERNETES_STATE
if [ -n "${CRUST_VERSIONS_GUEST:-}" ]; then # what prepare-guest.sh made
	mkdir -p "$S" "$CRUST_VERSIONS_GUEST/log" /usr/lib/cni
	ln -s "$CRUST_VERSIONS_GUEST/log" "$S/log"
	cp -r "$CRUST_VERSIONS_GUEST/pki" "$S/"
	cp "$CRUST_VERSIONS_GUEST"/cni/* /usr/lib/cni/
	[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd # bash's <(...)
	. selinux/policy.sh "$(cd ../.. && pwd)" || exit 2
	for m in overlay veth xfs btrfs loop; do modprobe "$m"; done
fi
"$CRUST_VERSIONS_TESTS" -test.v=test2json -test.parallel "${CRUST_VERSIONS_PARALLEL:-12}" -test.timeout 90m -test.run "$1"
code=$?
# Why, if not even the driver's pods run.
[ $code = 0 ] || ./cluster.sh exec kubectl -n crust-csi get events --field-selector=type=Warning,reason=FailedCreatePodSandBox \
	-o 'jsonpath={range .items[*]}{.message}{"\n"}{end}' | sed 's/.*\(OCI runtime\)/\1/; s/"[0-9a-f]\{64\}"/.../' | sort -u | tail -4
echo ASKED
./cluster.sh exec bash "$PWD/versions/ask.sh"
[ -n "${CRUST_VERSIONS_GUEST:-}" ] || ./cluster.sh down >&2
exit $code
