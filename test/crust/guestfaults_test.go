package crust

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A volume survives a killed agent and a guest without memory.
func TestAnAgentThatIsKilled(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	at := m.Path(p.target)
	sh(t, m, "echo kept > %s/f", at)
	agent := func() string {
		return sh(t, m, `for p in /proc/[0-9]*; do [ "$(readlink $p/exe)" = /init ] && [ $p != /proc/1 ] && echo ${p#/proc/}; done; true`)
	}
	for range 3 {
		pid := agent()
		_, _ = m.Exec("kill -9 " + pid) // the agent dies before it can answer
		if out := sh(t, m, "cat %s/f", at); out != "kept" {
			t.Errorf("after the agent's end: %q", out)
		}
		if now := agent(); now == pid {
			t.Errorf("the agent %s was not killed", pid)
		}
		ok(t, s.runtimePublish(p)) // it finds the volume mounted
	}
	// crustd too: after a restart it finds the sandbox and its volume.
	s.Restart()
	ok(t, s.runtimePublish(p))
	st, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
		&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	ok(t, err)
	if st.GetUsage()[0].GetTotal() == 0 {
		t.Error("no stats")
	}
	// Something uses up all memory. Whatever the kernel kills, the volume stays and can be taken
	// away.
	_, _ = m.Exec("mkdir -p /tmp/eat && mount -t tmpfs -o size=2G none /tmp/eat && dd if=/dev/zero of=/tmp/eat/f bs=1M 2>/dev/null; rm -f /tmp/eat/f")
	if out, err := m.Exec("rm -f /tmp/eat/f; cat " + at + "/f"); err != nil || strings.TrimSpace(out) != "kept" {
		if !m.gone() {
			t.Errorf("after it ran out of memory: %v %s", err, out)
		}
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}

func (m *machine) gone() bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.vm.PID))
	return err != nil || strings.Contains(string(b), ") Z ")
}

// A file system that panics the guest's kernel: the host survives, the error says what happened,
// and the volume can be published elsewhere.
func TestAFileSystemThatEndsTheGuest(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	// A directory whose block is noise: mounting works, reading the directory fails.
	v.Context = nil
	ok(t, s.Node.Client.Publish(ctxOf(t), v, s.Node.Target("host"), false))
	ok(t, os.Mkdir(s.Node.Target("host")+"/victim", 0o755))
	ok(t, os.WriteFile(s.Node.Target("host")+"/victim/f", []byte("x"), 0o644))
	ok(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, s.Node.Target("host")))
	v.Context = map[string]string{"allowRuntimeAssistedMount": "true"}
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	run(t, "tune2fs", "-e", "panic", p.info.Source) // nobody may set it as a mount option
	block := strings.Fields(run(t, "sh", "-c", "debugfs -R 'blocks /victim' "+p.info.Source+" 2>/dev/null"))[0]
	blockSize := strings.Fields(run(t, "sh", "-c", "dumpe2fs -h "+p.info.Source+" 2>/dev/null | grep '^Block size'"))[2]
	run(t, "dd", "if=/dev/urandom", "of="+p.info.Source, "bs="+blockSize, "seek="+block, "count=1", "conv=notrunc,fsync", "status=none")
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	_, err := m.Exec("ls -la " + m.Path(p.target) + "/victim")
	if err == nil {
		t.Fatal("the guest did not notice")
	}
	for deadline := time.Now().Add(patience(t)); !m.gone(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the guest lives: %v", err)
		}
	}
	m.Kill()
	if !strings.Contains(err.Error(), "the microVM has ended") {
		t.Errorf("the error: %v", err)
	}
	for deadline := time.Now().Add(patience(t)); ; time.Sleep(10 * time.Millisecond) {
		list, err := s.Client.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
		ok(t, err)
		if len(list.GetSandboxes()) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the sandbox is still listed")
		}
	}
	s.nodeUnpublish(p)
	// The next guest may have it as it is; this node's kernel must not mount it.
	ok(t, s.Node.Client.Unstage(ctxOf(t), v.ID))
	ok(t, s.Node.Client.Stage(ctxOf(t), v))
	refused(t, s.Node.Client.Publish(ctxOf(t), v, s.Node.Target("host"), false), codes.FailedPrecondition, "given to a guest")
	s.Delete(v)
}

// A device that never existed is refused. If a device loses its bytes under a mounted file system,
// only the guest sees errors.
func TestADeviceThatIsGone(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	q := *p
	q.info.Source = "/dev/loop-that-is-gone"
	refused(t, s.runtimePublish(&q), codes.FailedPrecondition, "does not exist")
	ok(t, s.runtimePublish(p))
	file := strings.TrimSpace(run(t, "losetup", "-n", "-O", "BACK-FILE", p.info.Source))
	ok(t, os.Truncate(file, 0))
	if out, err := m.Exec("ls -R " + m.Path(p.target) + "; dd if=/dev/sda of=/dev/null bs=1M count=16 && dd if=/dev/zero of=" +
		m.Path(p.target) + "/f bs=1M count=4 conv=fsync"); err == nil {
		t.Errorf("the guest noticed nothing: %s", out)
	}
	_, err := s.Client.RuntimeGetCapabilities(ctxOf(t), &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	ok(t, err)
	m.Kill()
	eventually(t, patience(t), "it is cleaned up", func() bool { return s.listed() == "" })
	s.nodeUnpublish(p)
	s.Delete(v)
}
