package crust

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// Without QEMU, `crustctl sandbox run` explains that in one line, and leaves nothing behind.
func TestFleet_SandboxRunWithoutQEMU(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"vmlinuz", "initramfs"} {
		ok(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	runDir := filepath.Join(dir, "run")
	for _, accel := range []string{"", "kvm", "tcg"} {
		c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "sandbox", "--crust", "unix://"+dir+"/nobody", "run", "vm",
			"--kernel", dir+"/vmlinuz", "--initramfs", dir+"/initramfs", "--run-dir", runDir, "--accel", accel)
		c.Env = append(os.Environ(), "PATH="+dir, "CRUST_ACCEL=")
		out, err := c.CombinedOutput()
		if said := string(out); err == nil || strings.Count(said, "\n") != 1 || strings.Contains(strings.ToLower(said), "kvm") ||
			!strings.Contains(said, "apt-get install qemu-system-x86") {
			t.Errorf("with %q: %v\n%s", accel, err, said)
		}
	}
	if _, err := os.Stat(runDir); !os.IsNotExist(err) {
		t.Errorf("left: %s: %v", runDir, err)
	}
}

// If KVM hangs its guests, `crustctl sandbox run` falls back to emulation and says why. If there is
// no KVM, it says that. With --accel tcg it tries no KVM, and says nothing. The microVM has copies of all mounts, so the test runs alone.
func TestSandboxRunFallsBackToEmulation(t *testing.T) {
	s := newServer(t, "qemu", "")
	qemu, err := exec.LookPath("qemu-system-x86_64")
	ok(t, err)
	bin := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *accel=kvm*) exec sleep 1000 ;; esac\nexec %s \"$@\"\n", qemu)
	ok(t, os.WriteFile(bin+"/qemu-system-x86_64", []byte(script), 0o755))
	// The mounts are its own, so that this machine's verdict stays unchanged.
	hidden := "mkdir -p /run/crust && mount -t tmpfs none /run/crust && { [ ! -e /dev/kvm ] || mount --bind " + bin +
		"/kvm /dev/kvm; } && exec \"$@\""
	ok(t, os.WriteFile(bin+"/kvm", nil, 0o600))
	ctl := func(args ...string) (string, string) {
		t.Helper()
		args = append([]string{"-m", "--propagation", "private", "sh", "-ec", hidden, "sh", testnode.BuildCommand(t, "crustctl", ""),
			"--timeout", (2 * patience(t)).String(), "sandbox", "--crust", "unix://" + s.Socket()}, args...)
		c := exec.Command("unshare", args...)
		c.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "CRUST_ACCEL=")
		var out, said strings.Builder
		c.Stdout, c.Stderr = &out, &said
		if err := c.Run(); err != nil {
			t.Fatalf("crustctl %v: %v\n%s%s", args, err, out.String(), said.String())
		}
		return out.String(), said.String()
	}
	g, runDir := guestDir(t), filepath.Join(s.Node.Dir, "run")
	out, said := ctl("run", "vm", "--kernel", g+"/vmlinuz", "--initramfs", g+"/initramfs", "--run-dir", runDir)
	defer ctl("rm", "vm", "--run-dir", runDir)
	if !strings.Contains(out, "running (tcg") {
		t.Errorf("it is run as\n%s", out)
	}
	want := "it hangs"
	if _, err := os.Stat("/dev/kvm"); err != nil {
		want = "there is no KVM here"
	}
	if !strings.Contains(said, want) || !strings.Contains(said, "the guest is emulated") || strings.Count(said, "\n") != 1 {
		t.Errorf("stderr, which should be one sentence with %q:\n%s", want, said)
	}
	if out, _ := ctl("exec", "vm", "cat", "/proc/sys/kernel/ostype"); out != "Linux\n" {
		t.Errorf("the guest says %q", out)
	}
	out, said = ctl("run", "emulated", "--accel", "tcg", "--kernel", g+"/vmlinuz", "--initramfs", g+"/initramfs", "--run-dir", runDir)
	defer ctl("rm", "emulated", "--run-dir", runDir)
	if !strings.Contains(out, "running (tcg") || said != "" {
		t.Errorf("with --accel tcg it is run as\n%s, and stderr is\n%s", out, said)
	}
}
