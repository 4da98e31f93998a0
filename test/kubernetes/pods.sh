#!/usr/bin/env bash
# Kubernetes' own end-to-end tests of what a pod is for its user (test/e2e/common), on three nodes. MICROVM runs their pods in microVMs.
# FOCUS is a regular expression of specs (default: what each node has to pass), PROCS how many run at a time.
set -euo pipefail
export LC_ALL=C
. "$(dirname "${BASH_SOURCE[0]}")/suite.sh"
begin pods
skip=('\[Serial\]' '\[Disruptive\]' '\[Slow\]' 'running a container with a new image' 'AllowPrivilegeEscalation' 'runAsNonRoot'
	'image defaults' 'https hook')
# docs/conformance.md has the reasons.
[ -z "${MICROVM:-}" ] || skip+=('tmpfs' 'FSGroup ownership' 'over websockets' 'node OS' 'Probing' 'Sleep Hook' 'estartable'
	'Should fail non-optional')
specs pods "Kubernetes' tests of pods" "${FOCUS:-NodeConformance}" "${skip[@]}" -- "$bin/pods.test" --
