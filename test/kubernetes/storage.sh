#!/usr/bin/env bash
# Kubernetes' own storage suite (External.Storage of its end-to-end tests) against the driver, on three nodes:
#
#   storage.sh KIND...    ext4 xfs btrfs, described in storage/KIND.yaml
#
# FOCUS is a regular expression of specs (default: all). QUICK leaves out those that the suite calls slow. MICROVM runs the suite's pods in
# microVMs. Prints the run, skipped and failed specs of each kind.
set -euo pipefail
export LC_ALL=C
. "$(dirname "${BASH_SOURCE[0]}")/suite.sh"
begin storage
failed=0 focus=${FOCUS:-External Storage}
for kind; do
	skip=('\[Disruptive\]' '\[Feature:Windows' '\[Feature:VolumeAttributesClass' 'with any volume data source')
	[ -z "${QUICK:-}" ] || skip+=('\[Slow\]')
	# ext4 grows while it is mounted only with CAP_SYS_RESOURCE, which root of some machines lacks (containers, mostly).
	if [ "$kind" = ext4 ] && [ $((0x$(awk '$1 == "CapEff:" {print $2}' /proc/self/status) >> 24 & 1)) = 0 ]; then
		echo "storage ext4: without growth, because this machine's root lacks CAP_SYS_RESOURCE"
		skip+=(volume-expand 'support expansion of pvcs')
	fi
	more=$here/storage/microvm/$kind.yaml
	# The mount of a guest's virtiofs, by which it gets what the node mounted, has a type and options of its own.
	[ -z "${MICROVM:-}" ] || [ -e "$more" ] || skip+=('provision storage with mount options' '\(ext4\)\] volumes should store data')
	# Their exec probe has one second to answer, which an emulated guest often needs.
	[ -z "${MICROVM:-}" ] || skip+=('should support restarting containers')
	# Who refuses such a subPath is the sandbox, when the container starts; these specs look for the kubelet's refusal before that.
	[[ $kind != sandbox-* ]] || skip+=('should fail if .* outside the volume')
	[ -z "${MICROVM:-}" ] || [ ! -e "$more" ] || cluster exec kubectl apply -f "$more" >/dev/null
	specs "$kind" "Kubernetes' storage suite" "$focus" "${skip[@]}" -- "$bin/storage.test" -- -storage.testdriver="$here/storage/$kind.yaml" || failed=1
	[ -z "${MICROVM:-}" ] || [ ! -e "$more" ] || cluster exec kubectl delete -f "$more" >/dev/null
done
exit $failed
