//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/tracing/collector"
)

// overlay applies an example of deploy/kubernetes/overlays to the cluster. The end of the test
// reinstalls the tests' csi-node.
func overlay(t testing.TB, name string, daemonsets ...string) {
	t.Helper()
	s := &space{t: t}
	project, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	s.kubectl("apply", "-k", project+"/deploy/kubernetes/overlays/"+name)
	for _, d := range daemonsets {
		s.kubectl("rollout", "status", "-n", system, "daemonset/"+d, "--timeout=110s")
	}
}

// 11.5: the example of a configuration file works unchanged: a pod gets its volume from a pool that
// only labelled nodes have, and no other node gets such a pod.
func TestOverlay_NodeConfigExample(t *testing.T) {
	const disk, image, label = "/mnt/crust-csi/nvme", "/var/lib/nvme-of-a-test", "example.com/disk"
	onNode(t, "mkdir -p "+disk+" && truncate -s 2G "+image+" && mkfs.xfs -q "+image+" && mount -o loop "+image+" "+disk)
	// csi-node waits for a pool that it has known. Forgetting this one takes a manual step.
	t.Cleanup(func() { onNode(t, "umount -l "+disk+"; rm -rf "+image+" /var/lib/csi-node/pools/fast.json") })
	of := &space{t: t}
	of.kubectl("label", "node", "node", label+"=nvme")
	t.Cleanup(func() { of.kubectl("label", "node", "node", label+"-") })
	// The example has no CRUST.
	of.kubectl("delete", "daemonset", "crust", "crust-agent", "-n", system, "--timeout=60s")
	t.Cleanup(func() {
		of.kubectl("delete", "-n", system, "--ignore-not-found", "configmap/csi-node-config", "storageclass/crust-fast",
			"clusterrole/crust-csi-node-labels", "clusterrolebinding/crust-csi-node-labels")
	})
	overlay(t, "node-config-example", "csi-node", "csi-sidecars")
	s := use(t)
	s.claim("fast", "crust-fast", "320Mi", "ReadWriteOnce")
	s.claim("plain", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"fast:/fast", "plain:/plain"}, anywhere)
	s.run("p", "echo kept >/fast/f; sync")
	if got := s.nodeOf("p"); got != "node" {
		t.Errorf("the pod is on %s, which has no pool fast", got)
	}
	if got := s.run("p", "grep ' /fast ' /proc/self/mountinfo"); !strings.Contains(got, " - xfs /dev/loop") {
		t.Errorf("in the pod: %s", got)
	}
	if got := onNode(t, "find "+disk+" -type f -size +64M"); strings.Count(got, "\n") != 0 || !strings.Contains(got, "/volumes/") {
		t.Errorf("in the pool of the configuration file: %q", got)
	}
	s.delete("p")
	s.claim("elsewhere", "crust-fast", "320Mi", "ReadWriteOnce")
	s.apply(podText("q", []string{"elsewhere:/data"}, away("node-2")))
	s.said("Pod/q", "FailedScheduling: .*not have enough free storage")
	s.pod("r", []string{"fast:/fast"})
	if got := s.run("r", "cat /fast/f"); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}

	// B6: pods and claims of a pool that is nearly full (less than a twentieth is left) say so.
	onNode(t, "fallocate -l $(($(stat -f -c %a*%S "+disk+") - (60<<20))) "+disk+"/others")
	for _, object := range []string{"Pod/r", "PersistentVolumeClaim/fast"} {
		s.saidWithin(stewardsPatience, object, "PoolNearlyFull: volume pvc-.*: pool fast has .* MiB left: thin volumes will fail writes")
	}
	onNode(t, "rm "+disk+"/others")
}

// 11.5: the traces example works unchanged, with a collector on the node: spans of the agent and
// the driver arrive in one trace.
func TestOverlay_TracesExample(t *testing.T) {
	c := collector.New(t)
	listen(t, c)
	overlay(t, "traces-example", "csi-node", "crust", "crust-agent")
	s := use(t)
	var claims []string
	for i := range 6 {
		name := fmt.Sprintf("c%d", i)
		s.claim(name, "crust-ext4", "64Mi", "ReadWriteOnce")
		claims = append(claims, name+":/"+name)
	}
	// One call of ten is sampled, and a pod makes about fifty.
	for round, end := 0, time.Now().Add(6*time.Minute); ; round++ {
		pod := fmt.Sprintf("p%d", round)
		s.pod(pod, claims)
		s.delete(pod)
		// Spans are sent every five seconds.
		for wait := time.Now().Add(8 * time.Second); time.Now().Before(wait); time.Sleep(300 * time.Millisecond) {
			if seen := oneTrace(c.Spans()); seen != "" {
				if !c.Has("k8s.node.name") {
					t.Error("no span says of which node it is")
				}
				t.Logf("after %d pods: %s", round+1, seen)
				return
			}
		}
		if time.Now().After(end) {
			var all []string
			for _, s := range c.Spans() {
				all = append(all, s.Service+" "+s.Name)
			}
			t.Fatalf("no trace of crust-agent and csi-node arrived; %d connections, spans: %q", c.Connections(), all)
		}
	}
}

// oneTrace finds a csi-node span below one of crust-agent.
func oneTrace(spans []collector.Span) string {
	for _, below := range spans {
		for _, above := range spans {
			if below.Service == "csi-node" && above.Service == "crust-agent" && below.Parent == above.ID && below.Trace == above.Trace {
				return below.Trace + ": " + above.Name + ", " + below.Name
			}
		}
	}
	return ""
}

// listen makes the collector, which is in the test's network, listen on port 4317 of the first
// node.
func listen(t testing.TB, c *collector.Collector) {
	t.Helper()
	path, err := filepath.Abs("../../.cache/kubernetes/node/otlp.sock")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer from.Close()
				to, err := net.Dial("tcp", strings.TrimPrefix(c.Endpoint(), "http://"))
				if err != nil {
					return
				}
				defer to.Close()
				go func() { _, _ = io.Copy(to, from) }()
				_, _ = io.Copy(from, to)
			}()
		}
	}()
	pid := onNode(t, "socat TCP-LISTEN:4317,bind=192.0.2.1,fork,reuseaddr UNIX-CONNECT:"+path+" </dev/null >/dev/null 2>&1 & echo $!")
	t.Cleanup(func() { onNode(t, "kill "+pid) })
}
