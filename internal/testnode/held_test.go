package testnode

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A refusal is repeated only while nobody can be found who has the device: what csi-node itself, or anybody else, keeps open or
// mounted is told at once.
func TestA12_OnlyADeviceThatNobodyHasIsWaitedFor(t *testing.T) {
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 16<<20); err != nil {
		t.Fatal(err)
	}
	run(t, "mkfs.ext4", "-q", image)
	device := strings.TrimSpace(run(t, "losetup", "--find", "--show", image))
	t.Cleanup(func() { run(t, "losetup", "--detach", device) })
	calls := func(refusal string) int {
		n := 0
		err := PatientUnstage(t.Context(), "/csi.v1.Node/NodeUnstageVolume", nil, nil, nil,
			func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				if n++; n < 3 {
					return status.Error(codes.FailedPrecondition, "volume a: "+device+refusal)
				}
				return nil
			})
		if (err == nil) != (n == 3) {
			t.Errorf("%d calls: %v", n, err)
		}
		return n
	}
	if n := calls(" is in use"); n != 3 {
		t.Errorf("nobody has it, %d calls", n)
	}
	if n := calls(": what was written last is lost"); n != 1 {
		t.Errorf("what is told once, %d calls", n)
	}
	file, err := os.Open(device)
	if err != nil {
		t.Fatal(err)
	}
	if n := calls(" is in use"); n != 1 {
		t.Errorf("it is open, %d calls", n)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run(t, "mount", device, dir)
	n := calls(" is in use")
	run(t, "umount", dir)
	if n != 1 {
		t.Errorf("it is mounted, %d calls", n)
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return string(out)
}
