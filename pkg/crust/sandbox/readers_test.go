package sandbox

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// machines is a backend as qemu: each sandbox holds its device O_EXCL by itself (readers share one descriptor), a machine that has ended
// holds nothing, and one whose socket is gone cannot be opened.
type machines struct {
	awkward
	mu   sync.Mutex
	gone map[string]bool
}

type machineBox struct {
	awkwardBox
	b  *machines
	id string
}

func (b *machines) Kind() string { return "machines" }
func (b *machines) Open(_ context.Context, o Opening) (Sandbox, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone[o.ID] {
		return nil, errors.New("QEMU does not answer at its socket: connection refused")
	}
	return machineBox{awkwardBox{b: &b.awkward}, b, o.ID}, nil
}

func (s machineBox) Publish(_ context.Context, v Volume) (Place, error) {
	return Place{Device: v.Device.Path, Path: v.Target}, nil
}
func (s machineBox) Unpublish(context.Context, Volume) error { return nil }
func (s machineBox) MountNamespace() string                  { return "" }

// Two pods on a node read a volume, each in a microVM. While crustd is away (an update), the machine of one of them ends. The server that
// starts then can neither take the volume from it nor deregister it as long as the other pod reads.
func TestC18_AReaderWhoseMachineEndedWhileTheServerWasAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 64<<20)); err != nil {
		t.Fatal(err)
	}
	loops := loopdev.Nodes{Dir: t.TempDir()}
	loop, err := loops.Attach(file, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loops.Detach(loop); err != nil {
			t.Error(err)
		}
	})
	claimed, err := linux.Open(loop.Path, os.O_RDONLY|linux.OExcl) // of both machines: see qmp.Client.File
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { claimed.Close() })
	process := func() *exec.Cmd {
		c := exec.Command("sleep", "1000")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
		return c
	}
	one, two := process(), process()
	b := &machines{gone: map[string]bool{}}
	c := Config{StateDir: t.TempDir(), KubeletDir: "/var/lib/kubelet", Backend: b}
	m, err := New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	d := mounter.Device{Path: loop.Path, Major: loop.Major, Minor: loop.Minor, ReadOnly: true}
	for id, p := range map[string]*exec.Cmd{"one": one, "two": two} {
		spec, err := NewSpec(id, p.Process.Pid, struct{}{})
		if err == nil {
			err = m.Register(t.Context(), spec)
		}
		if err == nil {
			target := "/var/lib/kubelet/pods/" + id + "/mount"
			_, err = m.Publish(t.Context(), id, Volume{Device: d, Target: target, Type: "ext4", ReadOnly: true})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	m.Stop()
	_, _ = one.Process.Kill(), one.Wait()
	b.gone["one"] = true
	if m, err = New(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Stop)
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		m.mu.Lock()
		_, known := m.sandboxes["one"]
		m.mu.Unlock()
		if !known {
			break
		}
		if time.Now().After(end) {
			// What crust-agent calls when the first pod is deleted (its letGo then refuses NodeUnpublishVolume: readsBesideOthers), and
			// when it gets a new sandbox (register deregisters the one before).
			t.Errorf("unpublish: %v", m.Unpublish(t.Context(), "one", d.Path))
			t.Errorf("deregister: %v", m.Deregister(t.Context(), "one"))
			break
		}
	}
}
