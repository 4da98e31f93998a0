//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Features of a container runtime, as it reports them to the kubelet by CRI.
const (
	userNamespaces    = "userNamespaces"
	recursiveReadOnly = "recursiveReadOnlyMounts"
)

// refuses tells whether the node's container runtime lacks a feature. That is so for a containerd before 2.0. The pod must then be refused
// with a message, and must not run as if the feature worked. The message is logged, and enters the table of versions. Every later
// containerd has the features.
func (s *space) refuses(feature, pod string) bool {
	s.t.Helper()
	if s.get("node/node", `.status.runtimeHandlers[?(@.name=="runc")].features.`+feature) == "true" {
		return false
	}
	runtime := s.get("node/node", ".status.nodeInfo.containerRuntimeVersion")
	if !strings.HasPrefix(runtime, "containerd://1.") {
		s.t.Fatalf("%s has no %s", runtime, feature)
	}
	s.apply(pod)
	var name, words string
	if m := regexp.MustCompile(`kind: Pod, metadata: \{name: ([a-z]+)\}`).FindStringSubmatch(pod); m != nil {
		name = m[1]
	}
	const what, no = `(user namespaces?|recursive read-?only|recursiveReadOnly|rro)`, `(not support|unsupported)`
	refused := regexp.MustCompile(`(?i)` + what + `[^\n]*` + no + `|` + no + `[^\n]*` + what)
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
	s.t.Logf("not supported: %s has no %s, and the pod is refused: %s", runtime, feature, words)
	return true
}

// C22, U03: the kubelet does not pass on that a pod has a user namespace, but the driver learns it.
// It gives the files on disk to the group, because the container runtime will map the mount.
func TestC22_U03_TheDriverIsToldOfHostUsers(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "test-idmap", "64Mi", "ReadWriteOnce")
	if s.refuses(userNamespaces, podText("unmapped", []string{"data:/data"}, group(3000), "hostUsers: false")) {
		return
	}
	s.pod("p", []string{"data:/data"}, group(3000), "hostUsers: false")
	s.run("p", "echo x >/data/f")
	if got := s.run("p", "stat -c %g /data /data/f"); got != "3000\n3000" {
		t.Errorf("in the pod: %q", got)
	}
}

// written makes a claim, data, with a file that a pod has written.
func (s *space) written() {
	s.t.Helper()
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("w", []string{"data:/data"})
	s.run("w", "echo x >/data/f")
}

// readOnly fails unless pods read that file and cannot write it.
func (s *space) readOnly(pods ...string) {
	s.t.Helper()
	for _, pod := range pods {
		if out, err := s.tryRun(pod, "echo y >/data/f"); err == nil || !strings.Contains(err.Error(), "Read-only file system") {
			s.t.Errorf("%s: %v %s", pod, err, out)
		}
		if got := s.run(pod, "cat /data/f"); got != "x" {
			s.t.Errorf("%s reads %q", pod, got)
		}
	}
}

// names returns the nodes' names.
func names() []string {
	all := []string{"node"}
	for i := 2; i <= nodes; i++ {
		all = append(all, fmt.Sprintf("node-%d", i))
	}
	return all
}

// allCapabilities reports whether root on this machine has all capabilities. A mounted ext4 grows
// only with CAP_SYS_RESOURCE.
func allCapabilities(t testing.TB) bool {
	t.Helper()
	return strings.HasSuffix(onNode(t, "grep CapEff /proc/1/status"), "1ffffffffff")
}
