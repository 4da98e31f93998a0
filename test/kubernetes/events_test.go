//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// csi-steward checks once a minute, and some conditions must last until the next check.
const stewardsPatience = 4 * time.Minute

// 11.5: while a pod waits for its group to be given to very many files, its events report the
// progress, the remaining time or that it is unknown, and the end. The walk outlives the kubelet's
// call. A frozen file system holds it, so nothing depends on the machine's speed.
func TestEvents_AWalkInProgress(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "1Gi", "ReadWriteOnce")
	s.pod("holder", []string{"data:/data"})
	s.run("holder", "cd /data && for d in $(seq 40); do mkdir d$d; (cd d$d && seq 500 | xargs touch); done; sync")
	target := s.target("holder", "data")
	freeze := func() { onNode(t, "fsfreeze -f "+target) }
	thaw := func() { onNode(t, "fsfreeze -u "+target) }
	t.Cleanup(func() { onNode(t, "fsfreeze -u "+target+" 2>/dev/null || true") })
	// progress returns the walk's current progress, or "".
	progress := func() string {
		out, _ := s.try("exec", "-n", system, s.daemon("csi-node", "node"), "-c", "csi-node", "--", "crustctl", "node", "drain-check")
		return regexp.MustCompile(`\d+ files looked at, \d+ changed for group \d+, [^;)]*`).FindString(out)
	}

	freeze()
	s.apply(podText("p", []string{"data:/data"}, group(4242)))
	begin := time.Now()
	s.saidWithin(stewardsPatience, "Pod/p", "GroupChangeRuns: volume pvc-.*: its files are being given to the pod's fsGroup for .*, "+
		"and the pod starts when that is done: 0 files looked at, .*how long it will take cannot be told")
	t.Logf("told after %s", time.Since(begin).Round(time.Second))
	// On its way. If a walk ends before it is held up, another follows, for another group.
	pod := "p"
	for try := 0; ; try++ {
		thaw()
		freeze()
		p := progress()
		if p != "" && !strings.HasPrefix(p, "0 files") {
			t.Logf("held after %d tries: %s", try, p)
			break
		}
		if p == "" {
			thaw()
			s.ready(pod)
			if try > 20 {
				t.Fatal("no walk was held up on its way")
			}
			pod = fmt.Sprintf("p-%d", try)
			freeze()
			s.apply(podText(pod, []string{"data:/data"}, group(5000+try)))
			s.until(time.Minute, "the walk begins", func() (string, bool) { got := progress(); return got, got != "" })
		}
	}
	s.saidWithin(2*stewardsPatience, "Pod/"+pod, `GroupChangeRuns: .*: \d+ files looked at, .*, about (\d+[hms])+ left`)
	// The kubelet's own event, after one more call.
	s.saidWithin(stewardsPatience, "Pod/"+pod, `FailedMount: .*NodePublishVolume is running since .* files looked at`)
	if got := s.get("pod/"+pod, ".status.phase"); got != "Pending" {
		t.Errorf("the pod is %s", got)
	}
	thaw()
	// The kubelet waits up to two minutes between two tries.
	s.kubectl("wait", "-n", s.ns, "--for=condition=Ready", "pod/"+pod, "--timeout=115s")
	s.saidWithin(stewardsPatience, "Pod/"+pod,
		`GroupChangeDone: .* within .*: 20\d\d\d files looked at, \d+ changed for group \d+, \d+ files/s$`)
	if got := s.kubectl("get", "events", "-n", s.ns, "--field-selector", "reason=GroupChangeRuns", "-o",
		`jsonpath={range .items[*]}{.involvedObject.name} {.message}{"\n"}{end}`); strings.Count(got, "\n") > 8 {
		t.Errorf("that is too often:\n%s", got)
	}
}

// 11.5: a claim was enlarged, and its file system cannot grow while a pod has it. Events tell pod
// and claim what to do, once, and it helps.
func TestEvents_GrowthThatWaitsForARestart(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	if allCapabilities(t) { // ext4 grows under the pod here, unless something holds it
		target := s.target("p", "data")
		onNode(t, "fsfreeze -f "+target)
		t.Cleanup(func() { onNode(t, "fsfreeze -u "+target+" 2>/dev/null || true") })
	}
	s.kubectl("patch", "pvc", "data", "-n", s.ns, "--type=merge", "-p", `{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}`)
	const words = "GrowthWaits: volume pvc-.*: it was enlarged to 128 MiB, and its file system has not grown yet: .*Delete all pods that use it, and make them again"
	s.saidWithin(stewardsPatience, "Pod/p", words)
	s.saidWithin(stewardsPatience, "PersistentVolumeClaim/data", words)
	time.Sleep(2 * time.Minute) // two more checks
	if got := s.kubectl("get", "events", "-n", s.ns, "--field-selector", "reason=GrowthWaits", "-o",
		`jsonpath={range .items[*]}{.involvedObject.kind} {.count}{"\n"}{end}`); got != "Pod 1\nPersistentVolumeClaim 1" &&
		got != "PersistentVolumeClaim 1\nPod 1" {
		t.Errorf("said: %s", got)
	}
	if allCapabilities(t) {
		onNode(t, "fsfreeze -u "+s.target("p", "data"))
	}
	s.delete("p")
	s.pod("q", []string{"data:/data"})
	if got := s.run("q", "df -k /data | tail -1 | awk '{print ($2 > 100*1024)}'"); got != "1" {
		t.Errorf("after what the event said: %s", s.run("q", "df -k /data"))
	}
}
