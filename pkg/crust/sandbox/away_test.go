package sandbox

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// awkward is a backend whose sandboxes mount anything, and cannot be closed or reached if a test
// says so.
type awkward struct {
	Backend
	opened  atomic.Int32
	noClose atomic.Bool
}

type awkwardBox struct {
	Sandbox
	b *awkward
}

func (*awkward) Kind() string       { return "awkward" }
func (*awkward) Close() error       { return nil }
func (*awkward) Forget(Spec) error  { return nil }
func (*awkward) Mounts(string) bool { return true }

func (b *awkward) Open(context.Context, Opening) (Sandbox, error) {
	b.opened.Add(1)
	return awkwardBox{b: b}, nil
}

func (awkwardBox) Detach() {}
func (s awkwardBox) Close() error {
	if s.b.noClose.Load() {
		return errors.New("something is left")
	}
	return nil
}

// manager returns one with the sandboxes on record, and its backend.
func manager(t *testing.T, records ...sandboxRecord) (*Manager, *awkward) {
	t.Helper()
	b := &awkward{}
	c := Config{StateDir: t.TempDir(), KubeletDir: "/var/lib/kubelet", Backend: b}
	s := newStore(filepath.Join(c.StateDir, "sandboxes"))
	boot, err := mounter.BootID()
	if err == nil {
		err = os.MkdirAll(s.Path, 0o700)
	}
	for _, r := range records {
		if err == nil {
			r.Kind, r.BootID = "awkward", boot
			err = s.put(r)
		}
	}
	var m *Manager
	if err == nil {
		m, err = New(t.Context(), c)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Stop)
	return m, b
}

// C18: a process that cannot be looked at may have ended, and another may have its pid by now.
func TestC18_ASandboxWhoseProcessCannotBeLookedAtIsNotOpened(t *testing.T) {
	m, b := manager(t, sandboxRecord{Spec: Spec{ID: "a"},
		Process: process{PID: os.Getpid(), Started: "earlier", Namespace: "another one"}})
	box, err := m.find("a")
	if err != nil {
		t.Fatal(err)
	}
	watched := false
	if _, err := m.reach(t.Context(), box, &watched); err == nil || watched || b.opened.Load() > 0 {
		t.Errorf("it is opened: %v, watched %v", err, watched)
	}
	// C19: it gets no device, which nobody could take from it again.
	v := Volume{Device: mounter.Device{Path: "/dev/null", Major: 1, Minor: 3}, Target: "/var/lib/kubelet/pods/u/mount", Type: "ext4"}
	if _, err := m.Publish(t.Context(), "a", v); !fault.Is(err, fault.State) {
		t.Errorf("publish: %v", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(box.record.Volumes) > 0 {
		t.Errorf("it has %v", box.record.Volumes)
	}
}

// C18: the end of a process is seen although it could be looked at only later.
func TestC18_TheEndOfASandboxThatWasFoundLate(t *testing.T) {
	m, _ := manager(t)
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() { _ = child.Process.Kill(); _ = child.Wait() }
	t.Cleanup(end)
	p, pidfd, err := identify(child.Process.Pid)
	if err == nil {
		err = pidfd.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	b := newRegistered(sandboxRecord{Kind: "awkward", Spec: Spec{ID: "late"}, Process: p})
	b.set(unreachable{errors.New("it could not be looked at")})
	m.take(b, nil)
	for {
		if _, away := b.sandbox().(unreachable); !away {
			break
		}
		time.Sleep(time.Millisecond)
	}
	end()
	select {
	case <-b.left:
	case <-time.After(time.Minute):
		t.Error("nobody saw its end")
	}
}

// C18: a sandbox that could not be closed as a whole is not used again. What is left is removed
// when the call is repeated.
func TestC18_ASandboxThatIsHalfClosed(t *testing.T) {
	m, b := manager(t)
	spec := Spec{ID: "a", PID: os.Getpid()}
	if err := m.Register(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	b.noClose.Store(true)
	if err := m.Deregister(t.Context(), "a"); err == nil {
		t.Fatal("it was to fail")
	}
	if _, err := m.find("a"); !fault.Is(err, fault.NotFound) {
		t.Errorf("it can be used: %v", err)
	}
	if err := m.Register(t.Context(), spec); !fault.Is(err, fault.Busy) {
		t.Errorf("it is registered: %v", err)
	}
	b.noClose.Store(false)
	if err := m.Deregister(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if err := m.Register(t.Context(), spec); err != nil {
		t.Error(err)
	}
	if _, err := m.find("a"); err != nil {
		t.Error(err)
	}
	// One that cannot be reached has lost nothing by the attempt.
	box := m.sandboxes["a"]
	box.set(unreachable{errors.New("no answer")})
	if err := m.Deregister(t.Context(), "a"); err == nil {
		t.Error("one that cannot be reached is deregistered")
	}
	if _, err := m.find("a"); err != nil {
		t.Errorf("it is not kept: %v", err)
	}
}

// finds is a backend that finds out which process a sandbox has.
type finds struct {
	*awkward
	pid int
}

func (b *finds) Process(context.Context, Spec) (int, error) { return os.Getpid(), nil }

func (b *finds) Open(ctx context.Context, o Opening) (Sandbox, error) {
	b.pid = o.PID
	return b.awkward.Open(ctx, o)
}

// R05: a runtime registers a sandbox without its process. The backend that opens it is told the process that it found.
func TestR05_AProcessThatTheBackendFound(t *testing.T) {
	b := &finds{awkward: &awkward{}}
	m, err := New(t.Context(), Config{StateDir: t.TempDir(), KubeletDir: "/var/lib/kubelet", Backend: b})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Stop)
	if err := m.Register(t.Context(), Spec{ID: "a"}); err != nil {
		t.Fatal(err)
	}
	if b.pid != os.Getpid() {
		t.Errorf("opened with process %d", b.pid)
	}
}
