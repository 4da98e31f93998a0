package fsprogs

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// D08: a file system that is mounted changes while a program reads it, so the program would find damage that is none. No program is
// started.
func TestD08_AMountedFileSystemIsNotChecked(t *testing.T) {
	for _, name := range []string{fstype.Ext4, fstype.XFS, fstype.Btrfs} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			run := func(args ...string) string {
				out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
				if err != nil {
					t.Fatalf("%q: %v: %s", args, err, out)
				}
				return strings.TrimSpace(string(out))
			}
			file := filepath.Join(dir, "disk")
			run("truncate", "-s", "320M", file)
			run(slices.Concat(fstype.Of(name).Make, []string{file})...)
			device := run("losetup", "--find", "--show", file)
			defer run("losetup", "--detach", device)
			run("mount", "-t", name, device, dir)
			defer run("umount", dir)
			p := New(func(program string) { t.Errorf("%s was started", program) })
			_, _, checked := p.Check(t.Context(), device, name)
			for what, err := range map[string]error{
				"check": checked, "grow": p.Grow(t.Context(), device, fstype.Ext4),
				"new identity": p.NewID(t.Context(), device, fstype.Btrfs),
			} {
				if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), device+" is in use") {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}
