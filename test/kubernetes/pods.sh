#!/usr/bin/env bash
# Kubernetes' own end-to-end tests of what a pod is for its user (test/e2e/common), on three nodes. MICROVM runs their pods in microVMs.
# FOCUS is a regular expression of specs (default: what each node has to pass), PROCS how many run at a time.
set -euo pipefail
export LC_ALL=C
. "$(dirname "${BASH_SOURCE[0]}")/suite.sh"
begin pods
# docs/conformance.md has the reasons.
skip=('\[Serial\]' '\[Disruptive\]' '\[Slow\]' 'running a container with a new image' 'AllowPrivilegeEscalation' 'runAsNonRoot' 'https hook'
	'via the environment' 'PrivilegedPod')
[ -z "${MICROVM:-}" ] || skip+=('tmpfs' 'FSGroup ownership' 'nonexistent volume subPath' 'over websockets' 'node OS' 'requesting a RuntimeClass'
	'Probing' 'Sleep Hook' 'estartable' 'Should fail non-optional')
specs pods "Kubernetes' tests of pods" "${FOCUS:-NodeConformance}" "${skip[@]}" -- "$bin/pods.test" --
