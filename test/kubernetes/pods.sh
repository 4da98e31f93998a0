#!/usr/bin/env bash
# Kubernetes' own end-to-end tests of what a pod is for its user (test/e2e/common), on three nodes. MICROVM runs their pods in microVMs.
# FOCUS is a regular expression of specs (default: what each node has to pass). Prints the specs that failed.
. "$(dirname "${BASH_SOURCE[0]}")/suite.sh"
begin pods
mkdir -p "$out/pods"
skip=('\[Serial\]' '\[Disruptive\]' '\[Slow\]' 'running a container with a new image' 'AllowPrivilegeEscalation' 'runAsNonRoot'
	'image defaults' 'https hook')
# An emulated guest takes longer than these specs wait, or they wait for minutes themselves.
[ -z "${MICROVM:-}" ] || skip+=('tmpfs' 'FSGroup ownership' 'over websockets' 'node OS' 'Probing' 'Sleep Hook' 'estartable'
	'Should fail non-optional')
failed=0
focus=${FOCUS:-NodeConformance}
cluster exec env "KUBE_TEST_REPO_LIST=$KUBE_TEST_REPO_LIST" "$bin/ginkgo" -procs="${PROCS:-10}" -no-color -timeout=60m \
	-focus="$focus" -skip="$(IFS="|"; echo "${skip[*]}")" -output-dir="$out/pods" -json-report=report.json \
	"$bin/pods.test" -- -kubeconfig=/etc/kubernetes/admin.kubeconfig -kubectl-path="$bin/kubectl" -provider=local \
	>"$out/pods/log" 2>&1 || failed=1
echo "pods: $(grep -aE '^Ran [0-9]+ of [0-9]+ Specs' "$out/pods/log" | tail -1) $(grep -aE '^(SUCCESS|FAIL)! ' "$out/pods/log" | tail -1)"
explain "$out/pods/report.json" "Kubernetes' tests of pods" "$focus" "${skip[@]}" || failed=1
[ -z "${MICROVM:-}" ] || echo "pods: $(microvms) pods in microVMs"
sed -n '/Summarizing/,/^Ran /p' "$out/pods/log" | grep -a '\[FAIL\]' || true
exit $failed
