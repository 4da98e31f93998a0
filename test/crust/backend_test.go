package crust

import (
	"encoding/hex"
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/microvm"
	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/namespace"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/qemu"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

const (
	toFile   = `cat > "$1"`
	fromFile = `cat "$1"`
)

func TestBackendNamespace(t *testing.T) {
	inside := func(in *crustv1alpha1.Sandbox, script, path, stdin string) (string, error) {
		c := exec.Command("nsenter", "--mount="+in.GetMountNamespace(), "sh", "-c", script, "sh", path)
		c.Stdin = strings.NewReader(stdin)
		out, err := c.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
		return string(out), nil
	}
	crusttest.TestBackend(t, crusttest.Kit{
		Open: func(t testing.TB, dir, kubeletDir string) sandbox.Backend {
			b, err := namespace.New(dir, kubeletDir)
			ok(t, err)
			return b
		},
		Sandbox: func(testing.TB) *crustv1alpha1.RegisterSandboxRequest { return &crustv1alpha1.RegisterSandboxRequest{} },
		Write: func(_ *sandbox.Server, in *crustv1alpha1.Sandbox, path, text string) error {
			_, err := inside(in, toFile, path, text)
			return err
		},
		Read: func(_ *sandbox.Server, in *crustv1alpha1.Sandbox, path string) (string, error) {
			return inside(in, fromFile, path, "")
		},
		Patience: patience(t),
	})
}

func TestBackendQEMU(t *testing.T) {
	t.Parallel()
	inside := func(s *sandbox.Server, in *crustv1alpha1.Sandbox, script, path, stdin string) (string, error) {
		r, err := s.ExecInSandbox(ctxOf(t), &crustv1alpha1.ExecInSandboxRequest{
			SandboxId: in.GetSandboxId(), Argv: []string{"/bin/sh", "-c", script, "sh", path}, Stdin: []byte(stdin),
		})
		if err == nil && r.GetExitCode() != 0 {
			err = fmt.Errorf("exit code %d: %s", r.GetExitCode(), r.GetOutput())
		}
		return string(r.GetOutput()), err
	}
	crusttest.TestBackend(t, crusttest.Kit{
		Open: func(t testing.TB, dir, _ string) sandbox.Backend {
			b, err := qemu.New(filepath.Join(dir, "qemu"), 0, slog.New(slog.DiscardHandler))
			ok(t, err)
			return b
		},
		Sandbox: func(t testing.TB) *crustv1alpha1.RegisterSandboxRequest {
			g := guestDir(t)
			vm, err := microvm.Start(ctxOf(t),
				microvm.Config{Dir: t.TempDir(), Kernel: g + "/vmlinuz", Initrd: g + "/initramfs", DieWithParent: true})
			ok(t, err)
			t.Cleanup(vm.Kill)
			magic, err := hex.DecodeString(vm.Magic)
			ok(t, err)
			return &crustv1alpha1.RegisterSandboxRequest{Pid: int64(vm.PID), Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{
				Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: vm.QMP, ChannelSocket: vm.Channel, ChannelMagic: magic}}}
		},
		Write: func(s *sandbox.Server, in *crustv1alpha1.Sandbox, path, text string) error {
			_, err := inside(s, in, toFile, path, text)
			return err
		},
		Read: func(s *sandbox.Server, in *crustv1alpha1.Sandbox, path string) (string, error) {
			return inside(s, in, fromFile, path, "")
		},
		Patience: patience(t),
	})
}
