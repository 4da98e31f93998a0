//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pidOf finds a process of the node by its name there.
func pidOf(t testing.TB, name string) string {
	t.Helper()
	return onNode(t, `cat /run/test/`+name+`.pid 2>/dev/null || pgrep -o -x `+name+` || true`)
}

// signal sends a signal to a process of the node, which may be starting just now.
func signal(t testing.TB, sig, name string) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if pid := pidOf(t, name); pid != "" {
			if _, err := onNodeIn("/", "kill -"+sig+" "+pid); err == nil {
				return
			}
		}
		if time.Now().After(end) {
			t.Fatalf("no process %s", name)
		}
	}
}

// settled waits until the node and the drivers are ready.
func settled(s *space) {
	s.t.Helper()
	s.until(90*time.Second, "the API server answers and the node is ready", func() (string, bool) {
		out, err := s.try("wait", "--for=condition=Ready", "node/node", "--timeout=30s")
		return fmt.Sprint(out, err), err == nil
	})
	for _, d := range []string{"daemonset/csi-node", "daemonset/csi-sidecars", "deployment/csi-resizer", "deployment/csi-steward",
		"daemonset/crust", "daemonset/crust-agent"} {
		s.kubectl("rollout", "status", "-n", system, d, "--timeout=90s")
	}
}

// A process is killed while pods start and stop, again and again: fifty times in make test-fleet. Every pod runs in the end, and
// nothing is left.
func TestKilledAgainAndAgain(t *testing.T) {
	s := use(t)
	victims := []string{"csi-node", "kubelet", "containerd", "crust-agent", "crustd"}
	const sets = 2
	rounds, settle := 15, 15
	if whole {
		rounds, settle = 50, 25
	}
	for i := range sets {
		s.claim(fmt.Sprintf("plain-%d", i), "crust-ext4", "64Mi", "ReadWriteOncePod")
		s.claim(fmt.Sprintf("sandbox-%d", i), "crust-sandbox", "64Mi", "ReadWriteOncePod")
	}
	pods := func(round int) []string {
		return []string{fmt.Sprintf("plain-%d", round), fmt.Sprintf("sandbox-%d", round)}
	}
	for round := range rounds {
		set := round % sets
		s.apply(podText(pods(round)[0], []string{fmt.Sprintf("plain-%d:/data", set)}) + "\n---\n" +
			podText(pods(round)[1], []string{fmt.Sprintf("sandbox-%d:/data", set)}, sandboxed))
		if round >= sets-1 {
			old := pods(round - sets + 1)
			s.try("delete", "pod", "-n", s.ns, old[0], old[1], "--grace-period=1", "--wait=false")
		}
		victim := victims[round%len(victims)]
		time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
		signal(t, "KILL", victim)
		if round%settle == settle-1 {
			// Wait for all of them; between these rounds, pods of several rounds are starting.
			settled(s)
			for _, p := range pods(round) {
				s.ready(p)
			}
			s.run(pods(round)[1], fmt.Sprintf("echo %d >>/data/rounds; sync", round))
		}
	}
	settled(s)
	s.until(120*time.Second, "every pod runs or is gone", func() (string, bool) {
		got := s.kubectl("get", "pods", "-n", s.ns,
			"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.phase} {.metadata.deletionTimestamp}{"\n"}{end}`)
		lines := strings.Split(got, "\n")
		return got, len(lines) == 2 && strings.Count(got, " Running") == 2
	})
	if got := s.run(pods(rounds - 1)[1], "cat /data/rounds"); !strings.Contains(got, fmt.Sprint(rounds-1)) {
		t.Errorf("%q", got)
	}
	// If a kubelet is killed between NodeUnpublishVolume and NodeUnstageVolume, only the volume's
	// next pod makes it find the volume again. The pods of the last rounds may have been deleted
	// before they had one.
	last := pods(rounds)
	for _, p := range last {
		more := []string{}
		if p == last[1] {
			more = append(more, sandboxed)
		}
		kind, _, _ := strings.Cut(p, "-")
		s.apply(podText(p, []string{fmt.Sprintf("%s-%d:/data", kind, rounds%sets)}, more...))
	}
	for _, p := range last {
		s.ready(p)
	}
}

// All processes end at once and all mounts are gone, as after a machine's reset. Pods run again,
// with their data.
func TestNodeReset(t *testing.T) {
	s := use(t)
	s.claim("fs", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOncePod", "volumeMode: Block")
	s.claim("sandbox", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("a", []string{"fs:/data", "raw:/dev/raw"})
	s.pod("b", []string{"sandbox:/data"}, sandboxed, group(3000))
	s.run("a", "echo fs >/data/f; echo raw | dd of=/dev/raw conv=fsync 2>/dev/null; sync")
	s.run("b", "echo sandbox >/data/f; sync")
	machine(t, "reboot")
	settled(s)
	s.until(120*time.Second, "both pods run again", func() (string, bool) {
		got := s.kubectl("get", "pods", "-n", s.ns,
			"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].ready} {.status.containerStatuses[0].restartCount}{"\n"}{end}`)
		return got, strings.Contains(got, "a true 1") && strings.Contains(got, "b true 1")
	})
	if got := s.run("a", "cat /data/f; head -c 3 /dev/raw"); got != "fs\nraw" {
		t.Errorf("a reads %q", got)
	}
	if got := s.run("b", "cat /data/f; stat -c %g /data/f"); got != "sandbox\n3000" {
		t.Errorf("b reads %q", got)
	}
	s.onlyPlaceholder("b", "sandbox")
}

// sandboxOf returns a pod's sandbox in containerd.
func (s *space) sandboxOf(pod string) string {
	s.t.Helper()
	return onNode(s.t, `ctr -n k8s.io containers ls -q 'labels."io.kubernetes.pod.uid"==`+s.get("pod/"+pod, ".metadata.uid")+
		`,labels."io.cri-containerd.kind"==sandbox' | tail -1`)
}

// C24: the agent does not answer when a pod gets a new sandbox. NRI continues without it. The
// container does not start, says why, and starts when the agent is back.
func TestC24_AnAgentThatDoesNotAnswer(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed)
	s.run("p", "echo kept >/data/f; sync")
	signal(t, "STOP", "crust-agent")
	t.Cleanup(func() { onNode(t, "pkill -CONT -x crust-agent || true") })
	onNode(t, "ctr -n k8s.io tasks kill -s KILL "+s.sandboxOf("p"))
	s.said("Pod/p", "Failed: .*of a volume that was deferred")
	if out, err := s.tryRun("p", "echo node >/data/g"); err == nil {
		t.Errorf("it ran: %s", out)
	}
	s.onlyPlaceholder("p", "data")
	signal(t, "CONT", "crust-agent")
	s.until(90*time.Second, "the pod runs again", func() (string, bool) {
		out, err := s.tryRun("p", "cat /data/f && echo back >/data/g")
		return fmt.Sprint(out, err), err == nil && out == "kept"
	})
	s.onlyPlaceholder("p", "data")
}

// C22: killing an agent changes no published volume, and the driver is reachable again when the
// agent is back.
func TestC22_AnAgentThatIsKilled(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.claim("other", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed)
	for _, victim := range []string{"crust-agent", "crustd"} {
		signal(t, "KILL", victim)
		s.run("p", "echo "+victim+" >>/data/f && sync && cat /data/f")
	}
	s.pod("q", []string{"other:/data"})
	s.run("q", "echo x >/data/f")
	settled(s)
	s.delete("p")
	s.pod("r", []string{"data:/data"}, sandboxed)
	if got := s.run("r", "cat /data/f"); got != "crust-agent\ncrustd" {
		t.Errorf("%q", got)
	}
}

// C24, the downgrade: CRUST is removed from the node while a pod has a deferred volume. The pod
// continues. Nobody else gets its volume until CRUST is back, and the events say so.
func TestC24_CRUSTIsRemovedUnderAPod(t *testing.T) {
	s := use(t)
	project, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed)
	s.run("p", "echo kept >/data/f; sync")
	s.kubectl("delete", "daemonset", "crust", "crust-agent", "-n", system, "--timeout=60s")
	s.kubectl("apply", "-k", project+"/deploy/kubernetes/base")
	s.kubectl("rollout", "status", "-n", system, "daemonset/csi-node", "--timeout=90s")
	t.Cleanup(func() { s.kubectl("delete", "pods", "--all", "-n", s.ns, "--timeout=90s", "--grace-period=1") })
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	if got := s.run("p", "cat /data/f"); got != "kept" {
		t.Errorf("the pod reads %q", got)
	}
	s.kubectl("delete", "pod", "p", "-n", s.ns, "--grace-period=1", "--wait=false")
	s.until(60*time.Second, "the driver says who has the volume", func() (string, bool) {
		got := s.kubectl("logs", "-n", system, s.daemon("csi-node", "node"), "-c", "csi-node", "--tail=50")
		return got, strings.Contains(got, "method=NodeUnpublishVolume") &&
			strings.Contains(got, "is still mounted by the sandbox of the pod at")
	})
	s.onlyPlaceholder("p", "data")
	// crustd is back before the agent: the kubelet unpublishes without the agent, which forgets the
	// volume later.
	s.kubectl("apply", "-k", project+"/deploy/kubernetes/crust", "-l", "app.kubernetes.io/name=crust")
	s.kubectl("wait", "-n", s.ns, "--for=delete", "pod/p", "--timeout=90s")
	if err := install(); err != nil {
		t.Fatal(err)
	}
	s.until(90*time.Second, "the agent forgets it", func() (string, bool) {
		got := onNode(t, "ls /var/lib/crust-agent/deferrals")
		return got, got == ""
	})
	s.pod("q", []string{"data:/data"}, sandboxed)
	if got := s.run("q", "cat /data/f"); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}
}
