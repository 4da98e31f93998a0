//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// What a container runtime says that it does, as the kubelet has it of CRI.
const (
	userNamespaces    = "userNamespaces"
	recursiveReadOnly = "recursiveReadOnlyMounts"
)

// needs is a test that wants of the node's runtime what an older one does not do. There, what counts is that
// the pod is refused in words, and does not run as if it had been done; the test ends with these words.
func (s *space) needs(feature, pod string) {
	s.t.Helper()
	if s.get("node/node", `.status.runtimeHandlers[?(@.name=="runc")].features.`+feature) == "true" {
		return
	}
	s.apply(pod)
	var name, words string
	if m := regexp.MustCompile(`kind: Pod, metadata: \{name: ([a-z]+)\}`).FindStringSubmatch(pod); m != nil {
		name = m[1]
	}
	refused := regexp.MustCompile(`(?i)(user namespaces?|recursive read-?only|recursiveReadOnly|rro)[^\n]*(not support|unsupported)|(not support|unsupported)[^\n]*(user namespace|recursive)`)
	s.until(90*time.Second, "the pod is refused, for the runtime has no "+feature, func() (string, bool) {
		words = s.kubectl("get", "events", "-n", s.ns, "-o", `jsonpath={range .items[*]}{.reason}: {.message}{"\n"}{end}`)
		words += "\n" + s.get("pod/"+name, ".status.containerStatuses[*].state.waiting.message")
		for line := range strings.Lines(words) {
			if refused.MatchString(line) {
				words = strings.TrimSpace(line)
				return words, true
			}
		}
		return words, false
	})
	if got := s.get("pod/"+name, ".status.containerStatuses[*].state.running"); got != "" {
		s.t.Fatalf("the pod runs, though the runtime has no %s: %s", feature, got)
	}
	s.t.Skip(fmt.Sprintf("%s has no %s, and the pod is refused: %s", s.get("node/node", ".status.nodeInfo.containerRuntimeVersion"), feature, words))
}
