package crust

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// A pod whose virtiofsd ends must end, too: its containers have lost their files. What they wrote to a volume is not lost.
func TestC19_APodThatHasToEndLosesNoData(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	v := s.Volume("v", "ext4")
	p := s.pod("pod-e", v)
	ok(t, s.nodePublish(p))
	pause := r.pod(t, p.name, "")
	ok(t, s.runtimePublish(p))
	c, err := r.start(t, "writer", r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c",
		"echo last > /data/last; echo up; while :; do busybox sleep 0.1; done").add(mount("/data", "bind", p.target, "rbind")))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it runs", func() bool { return strings.Contains(c.text(t), "up") })
	var pod struct{ Monitor struct{ PID int } }
	readJSON(t, filepath.Join(r.pods, p.name, "pod.json"), &pod)
	out, err := exec.Command("pgrep", "-P", strconv.Itoa(pod.Monitor.PID), "virtiofsd").Output()
	ok(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	ok(t, err)
	virtiofsd, err := os.FindProcess(pid)
	ok(t, err)
	ok(t, virtiofsd.Kill())
	if status := pause.wait(t); status != 137 {
		t.Errorf("the pod's own container ended with %d", status)
	}
	if status := c.wait(t); status != 137 {
		t.Errorf("the container ended with %d", status)
	}
	r.delete(t, "writer")
	r.end(t, pause)
	b, err := os.ReadFile(filepath.Join(r.pods, ".ended", p.name+".log"))
	if err != nil || !strings.Contains(string(b), "virtiofsd has ended: signal: killed") {
		t.Errorf("why the pod ended: %v %s", err, b)
	}
	t.Logf("%s", b)
	s.lastOnTheHost(t, p, v)
}
