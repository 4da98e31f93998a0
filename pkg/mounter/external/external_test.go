package external

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

func run(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return strings.TrimSpace(string(out))
}

// A mount that mount(8) made in scratch is taken over detached. (The kernel here may have no SMB; the
// method is the same for any type.)
func TestMountByAnExternalProgram(t *testing.T) {
	image := filepath.Join(t.TempDir(), "disk")
	run(t, "truncate", "-s", "16M", image)
	run(t, "mkfs.ext4", "-q", image)
	device := run(t, "losetup", "-f", "--show", image)
	t.Cleanup(func() { run(t, "losetup", "-d", device) })
	scratch := filepath.Join(t.TempDir(), "scratch")
	o, err := mounter.ParseOptions([]string{"commit=7,nodev"})
	if err != nil {
		t.Fatal(err)
	}
	m, err := Open(t.Context(), scratch, device, "ext4", o, true)
	if err != nil {
		t.Fatal(err)
	}
	if usage, err := m.Usage(); err != nil || usage.TotalBytes < 8<<20 {
		t.Errorf("%+v, %v", usage, err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	_, err = Open(t.Context(), scratch, "127.0.0.1:/none", "nosuchfs", mounter.Options{}, false)
	if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "nosuchfs") {
		t.Errorf("an unknown type: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if m, err := Open(ended, scratch, device, "ext4", o, true); m != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that left: %v, %v", m, err)
	}
	if _, err := os.Stat(scratch); !os.IsNotExist(err) {
		t.Errorf("scratch is left: %v", err)
	}
}

// A password is in no error: a kubelet writes that into an event.
func TestThePasswordIsInNoError(t *testing.T) {
	o, err := mounter.ParseOptions([]string{"username=u", "password=hunter2"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err = Open(t.Context(), filepath.Join(t.TempDir(), "scratch"), "//127.0.0.1/x", "cifs", o, false); err == nil ||
		strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "username=u") {
		t.Error(err)
	}
}
