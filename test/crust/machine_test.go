package crust

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/microvm"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// guestDir returns the directory of `make guest`.
func guestDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../../.cache/guest")
	ok(t, err)
	if _, err := os.Stat(dir + "/initramfs"); err != nil {
		t.Fatal("no guest: run `make guest`")
	}
	return dir
}

// oneBoot measures how long a guest takes on this machine from its start to its agent's answer.
var oneBoot = sync.OnceValues(func() (took time.Duration, err error) {
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	g, err := filepath.Abs("../../.cache/guest")
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	c := microvm.Config{Dir: dir, Kernel: g + "/vmlinuz", Initrd: g + "/initramfs", DieWithParent: true}
	choice, err := microvm.Choose(ctx, c)
	if err != nil {
		return 0, err
	}
	c.Accel = choice.Accel
	begin := time.Now()
	vm, err := microvm.Start(ctx, c)
	if err != nil {
		return 0, err
	}
	defer vm.Kill()
	if err := vm.Answers(ctx); err != nil {
		console, _ := os.ReadFile(vm.Console)
		return 0, fmt.Errorf("a guest with %s: %w\n%s", vm.Accel, err, console)
	}
	return time.Since(begin), nil
})

// patience is how long a test waits for a guest's boot: twenty times the measured boot, because the
// machine may be busier later, and at least a minute.
func patience(t testing.TB) time.Duration {
	t.Helper()
	boot, err := oneBoot()
	ok(t, err)
	return max(time.Minute, 20*boot)
}

// oneCall is how long a call to a running guest may take: more than the measured boot, and at least
// 10 s.
func oneCall(t testing.TB) time.Duration {
	t.Helper()
	return patience(t) / 6
}

// machine is a sandbox of the qemu backend.
type machine struct {
	t  testing.TB
	s  *server
	id string
	vm *microvm.VM
}

// boot starts a microVM and registers it.
func (s *server) boot(p *pod, kind, more string) *machine {
	s.T.Helper()
	m := s.start(p, kind, more)
	m.register()
	return m
}

func (s *server) start(p *pod, kind, more string) *machine {
	s.T.Helper()
	dir, err := os.MkdirTemp("", "vm")
	ok(s.T, err)
	s.T.Cleanup(func() { ok(s.T, os.RemoveAll(dir)) })
	g := guestDir(s.T)
	initrd := g + "/initramfs"
	if s.initrd != "" {
		initrd = s.initrd
	}
	vm, err := microvm.Start(ctxOf(s.T), microvm.Config{
		Dir: dir, Kernel: g + "/vmlinuz", Initrd: initrd, Machine: kind, Append: more, DieWithParent: true,
	})
	ok(s.T, err)
	m := &machine{t: s.T, s: s, id: p.name, vm: vm}
	s.T.Cleanup(func() {
		if s.T.Failed() {
			if b, err := os.ReadFile(vm.Console); err == nil {
				s.T.Logf("the guest's console:\n%s", b[max(0, len(b)-4000):])
			}
		}
		m.Kill()
	})
	return m
}

func (m *machine) register() {
	m.t.Helper()
	magic, err := hex.DecodeString(m.vm.Magic)
	ok(m.t, err)
	_, err = m.s.Client.RegisterSandbox(ctxOf(m.t), &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: m.id, Pid: int64(m.vm.PID),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: m.vm.QMP, ChannelSocket: m.vm.Channel,
			ChannelMagic: magic}},
	})
	ok(m.t, err)
}

func (m *machine) Kill() { m.vm.Kill() }

func (m *machine) Path(target string) string {
	m.t.Helper()
	path, err := m.find(target)
	ok(m.t, err)
	return path
}

func (m *machine) find(target string) (string, error) {
	list, err := m.s.Client.ListSandboxes(ctxOf(m.t), &crustv1alpha1.ListSandboxesRequest{})
	if err != nil {
		return "", err
	}
	for _, sb := range list.GetSandboxes() {
		for _, v := range sb.GetVolumes() {
			if sb.GetSandboxId() == m.id && v.GetHostTargetPath() == target {
				return v.GetSandboxPath(), nil
			}
		}
	}
	return "", fmt.Errorf("sandbox %s has nothing of %s", m.id, target)
}

func (m *machine) Exec(command string) (string, error) {
	r, err := m.s.Client.ExecInSandbox(ctxOf(m.t),
		&crustv1alpha1.ExecInSandboxRequest{SandboxId: m.id, Argv: []string{"/bin/sh", "-c", command}})
	if err == nil && r.GetExitCode() != 0 {
		err = fmt.Errorf("exit status %d", r.GetExitCode())
	}
	return string(r.GetOutput()), err
}

// acquaintance is what a crustd keeps of the first guest that it has seen, once a test has needed it.
var acquaintance struct {
	sync.Mutex
	kept []byte
}

// acquaint makes the server know guests' capabilities. The first test boots a guest for that. The servers of the others find what
// that one's server kept, as after a restart.
func (s *server) acquaint() {
	s.T.Helper()
	acquaintance.Lock()
	defer acquaintance.Unlock()
	file := filepath.Join(s.StateDir(), "qemu/guest.json")
	if acquaintance.kept != nil {
		s.Kill()
		ok(s.T, os.WriteFile(file, acquaintance.kept, 0o600))
		s.Start()
		return
	}
	p := &pod{name: "acquaintance"}
	m := s.boot(p, "q35", "")
	s.hasAsked(m)
	s.deregister(p)
	m.Kill()
	eventually(s.T, patience(s.T), "crustd has kept what the guest told", func() bool {
		b, err := os.ReadFile(file)
		acquaintance.kept = b
		return err == nil
	})
}

// hasAsked waits until the server has queried the machine's file systems. A query that is lost is
// repeated after a minute, so it waits for three.
func (s *server) hasAsked(m *machine) {
	s.T.Helper()
	for deadline := time.Now().Add(max(3*time.Minute, patience(s.T))); ; time.Sleep(20 * time.Millisecond) {
		fs, err := s.Client.RuntimeGetSupportedFileSystems(ctxOf(s.T), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		ok(s.T, err)
		if len(fs.GetFileSystems()) > 0 {
			return
		}
		if time.Now().After(deadline) {
			console, _ := os.ReadFile(m.vm.Console)
			s.T.Fatalf("the guest does not tell its file systems; its console ends with %q", console[max(0, len(console)-300):])
		}
	}
}
