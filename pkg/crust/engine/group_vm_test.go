//go:build vm

package engine

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// C16, F07: a pod in a sandbox writes to a FAT file system with its fsGroup.
func TestC16_ASandboxGivesFATToAGroup(t *testing.T) {
	ok := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, mkfs := range map[string]string{"vfat": "mkfs.vfat", "exfat": "mkfs.exfat"} {
		t.Run(name, func(t *testing.T) {
			img := filepath.Join(t.TempDir(), "img")
			ok(t, os.WriteFile(img, nil, 0o600))
			ok(t, os.Truncate(img, 64<<20))
			loops := loopdev.Nodes{Dir: t.TempDir()}
			loop, err := loops.Attach(img, false)
			ok(t, err)
			t.Cleanup(func() { ok(t, loops.Detach(loop)) })
			if out, err := exec.Command(mkfs, loop.Path).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", mkfs, err, out)
			}
			group := uint32(4242)
			m, err := Open(t.Context(), Request{Device: mounter.Device{Path: loop.Path, Major: loop.Major, Minor: loop.Minor}, Type: name,
				Group: &group, Policy: ownership.Always})
			ok(t, err)
			defer m.Close()
			dir, err := m.Dir()
			ok(t, err)
			defer dir.Close()
			st, err := dir.Stat()
			ok(t, err)
			if s := st.Sys().(*syscall.Stat_t); s.Gid != group || st.Mode().Perm()&0o070 != 0o070 {
				t.Errorf("the root has group %d and mode %v", s.Gid, st.Mode())
			}
		})
	}
}
