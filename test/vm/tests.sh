#!/usr/bin/env bash
# Runs the tests that depend on the kernel in guests: the first argument is their
# kernels ("6.1" or "6.1,6.12", which run beside each other), more arguments are
# for `go test`. One boot serves all tests of a kernel. SHORT=1 runs what a
# kernel can break: SELinux, NFS, device-mapper, sick disks, cgroups, system calls.
# With PART=1 or PART=2 it is one half of that, for a run of CI.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
S=$PWD/.cache/vm
kernels=$1
shift
mkdir -p "$S/bin" "$S/tmp"
export CGO_ENABLED=0 CRUST_TEST_BIN=$S/bin
go build -o "$S/bin/" ./cmd/csi-node ./cmd/crustctl
go build -tags failpoint -o "$S/bin/csi-nodefailpoint" ./cmd/csi-node
go build -o "$S/bin/inside" ./test/node/inside
(cd test/runtimes && CGO_ENABLED=1 go build -o "$S/bin/runc" github.com/opencontainers/runc)
# A guest boots no guests and has no compiler: what needs one stays here, and so does what no kernel changes.
skip="D01_Foreign|D02_Formatted|D06|D07|D08|D10|RandomCallSequences|Crustctl|AbortedWhile|ValidateCapabilities|VolumeWhoseFile|Ext4InodesTell|D09_CopiesBeside|SocketTakeover|SIGTERMFinishes|ADeferralOfANewer|TestA0[2-46-8]|TestA05_[^W]|TestA1[0135]|TestA12_(Looking|Whole|AForeign)|TestALow|TestB0|TestAudit|F04_Killed|A09_EachCapability|A01_AChangedDeviceIsStillTheVolumes/[^e]|R04_WhatWasApplied|DataSurvivesEverything|TestBad|DeleteSnapshotWhile|MetricsAndHealth|OfAPoolThatIsNot|D01_GivenOut|TestA14_TheNext|F09|TestStaticDevice|SingleWriter|ReaderOnlyMode|NoProgramOnTheWay|TestA09|SnapshotOfABusy|ExpandedWhile|RepublishWithAnotherGroup|PartOfAFile|GrowthDue|AWalkBeside|TestD0[345]|D11_AShutDown|D11_APoolThat|D11_GrowthOnTheNode|TestScale|AProgramIsBuiltOnce"
part=${PART:-}
shorts=(
	[1]="TestS0[1256]" # and the alert
	[2]="TestS0[^1256]|TestS1|TestNFS|C09|F07|R02|TestD11|A01_AMapped|A01_TheNodeSays|A01_APodCannotUnbind|A01_TheKubelets|A01_Udevd"
)
short=${part:+${shorts[part]:?PART is 1 or 2}}
short=${short:-${shorts[1]}|${shorts[2]}}
# Labels of every file system, the policy's denials, and what counts labels: with SHORT, for the newest kernel only.
newest="S02_EveryFile|S02_Enforcing|S01_WithTheHosts|S05_ALabelCosts|TestS09"
# Denials take long under emulation. They are alike for all file systems, so SHORT has ext4 and a share.
denials="S02_EnforcingAPodOfAnotherLevelIsDenied/^[^en]"
everything=() # what runs where no argument says otherwise
[ $# -gt 0 ] || everything=(-tags vm $(go list ./internal/... | grep -v /internal/microvm) ./pkg/... ./test/node)
# The compiled tests lie in the share.
tests() { GOTMPDIR=$S/tmp go test -exec "$S/vm exec" -p 1 -count=1 -timeout "${TIMEOUT:-60m}" ${TESTFLAGS:-} "$@"; }
# One alert needs a kernel with SELinux.
alert() { tests -tags vm -run TestS09 ./test/monitoring; }
# ManyPrograms is about threads, alike for all kernels, and takes minutes under emulation.
packages() { tests -tags vm -skip ManyProgramsBesideEachOther ./internal/linux ./internal/confine ./internal/loopdev ./pkg/mounter; }
both() {
	[ "$part" = 1 ] || packages || return
	tests -tags vm "$@" ./test/node || return
	[ "$part" = 2 ] || ! labels || alert # it counts labels: see newest
}
# labels tells whether this kernel is the newest of the run.
labels() { [ "$CRUST_TEST_KERNEL" = "${kernels##*,}" ]; }
run() {
	# Sick disks are slow, and alike for both kernels. Linux 6.1's SMB server and Debian 12's
	# tools for it do not go together.
	local not=$skip
	[ "$CRUST_TEST_KERNEL" = 6.12 ] || not+="|TestD11|TestA05|OneSMBServer"
	if labels; then not+="${SHORT:+|$denials}"; else not+="${SHORT:+|$newest}"; fi
	export S kernels part
	export -f tests alert packages both labels
	if [ ${#everything[@]} -eq 0 ]; then
		"$S/vm" run -kernel "$CRUST_TEST_KERNEL" bash -c 'tests "$@"' tests "$@"
	elif [ -n "${SHORT:-}" ]; then
		"$S/vm" run -kernel "$CRUST_TEST_KERNEL" bash -c 'both "$@"' both -run "$short" -skip "$not"
	else
		"$S/vm" run -kernel "$CRUST_TEST_KERNEL" bash -c 'tests "$@" && alert' tests -skip "$not" "${everything[@]}"
	fi
}
on() { # kernel
	export CRUST_TEST_KERNEL=$1
	shift
	local code=0
	run "$@" || code=$?
	if [ "$code" -eq 3 ]; then
		# The emulator breaks a guest's kernel now and then; one that our mounts break
		# breaks again.
		echo "the guest died: once more in a new one" >&2
		code=0
		run "$@" || code=$?
	fi
	return "$code"
}
code=0
pids=() logs=()
for kernel in ${kernels//,/ }; do
	logs+=("$S/tests-$kernel.log")
	on "$kernel" "$@" >"${logs[-1]}" 2>&1 &
	pids+=($!)
done
for i in "${!pids[@]}"; do
	wait "${pids[i]}" || code=$?
	cat "${logs[i]}"
done
exit "$code"
