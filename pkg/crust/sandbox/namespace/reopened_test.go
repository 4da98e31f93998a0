package namespace

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// short is a backend that cannot open a sandbox a few times, as when the node has no memory or no descriptor left.
type short struct {
	*Backend
	fails atomic.Int32
}

func (b *short) Open(ctx context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	if b.fails.Add(-1) >= 0 {
		return nil, linux.ENOMEM
	}
	return b.Backend.Open(ctx, o)
}

// A pod is killed (of memory, with its pause) while crustd is away. The server that starts then has no memory for a moment. Its volume must
// be released all the same, sooner or later.
func TestC18_ASandboxThatEndedAndCannotBeOpenedForAMoment(t *testing.T) {
	dir, kubelet := t.TempDir(), t.TempDir()
	file := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 64<<20)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", file).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	loops := loopdev.Nodes{Dir: t.TempDir()}
	loop, err := loops.Attach(file, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loops.Detach(loop); err != nil {
			t.Error(err)
		}
	})
	pause := exec.Command("sleep", "1000")
	if err := pause.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = pause.Process.Kill(); _ = pause.Wait() }
	t.Cleanup(kill)
	start := func(fails int32) *sandbox.Manager {
		b, err := New(dir, kubelet)
		if err != nil {
			t.Fatal(err)
		}
		s := &short{Backend: b}
		s.fails.Store(fails)
		m, err := sandbox.New(t.Context(), sandbox.Config{StateDir: dir, KubeletDir: kubelet, Backend: s, Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	m := start(0)
	spec, err := sandbox.NewSpec("a", pause.Process.Pid, registration{})
	if err == nil {
		err = m.Register(t.Context(), spec)
	}
	target := filepath.Join(kubelet, "pods/u/mount")
	if err == nil {
		err = os.MkdirAll(target, 0o750)
	}
	if err == nil {
		_, err = m.Publish(t.Context(), "a", sandbox.Volume{Device: mounter.Device{Path: loop.Path, Major: loop.Major, Minor: loop.Minor},
			Target: target, Type: "ext4"})
	}
	if err != nil {
		t.Fatal(err)
	}
	m.Stop()
	kill()
	m = start(2) // at its start, and once more
	busy := true
	for end := time.Now().Add(time.Minute); busy && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if busy, err = mounter.Busy(loop.Path); err != nil {
			t.Fatal(err)
		}
	}
	if busy {
		t.Errorf("the device of a sandbox that has ended stays in use; deregister: %v", m.Deregister(t.Context(), "a"))
	}
	m.Stop()
	m = start(0) // clean up
	for end := time.Now().Add(time.Minute); busy && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		busy, _ = mounter.Busy(loop.Path)
	}
	m.Stop()
}
