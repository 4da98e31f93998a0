package loopdev

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// A12: the kernel gives out a device as free that some process has open exclusively, and no other one until that is closed. A volume is
// attached all the same.
func TestA12_AFreeDeviceThatSomebodyClaims(t *testing.T) {
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	defer ctl.Close()
	var claimed *os.File
	for claimed == nil { // other tests take free devices, too
		index, err := linux.LoopGetFree(ctl)
		if err != nil {
			t.Fatal(err)
		}
		if claimed, err = linux.Open(fmt.Sprintf("/dev/loop%d", index), os.O_RDONLY|linux.OExcl); err != nil && !taken(err) {
			t.Fatal(err)
		}
		if now, err := linux.LoopGetFree(ctl); claimed != nil && (err != nil || now != index) {
			claimed.Close()
			claimed = nil
		}
	}
	defer claimed.Close()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	d := attach(t, path, false)
	t.Logf("%s after %s", d.Path, time.Since(begin))
	if d.Path == claimed.Name() {
		t.Errorf("it is attached to %s, which somebody claims", d.Path)
	}
}
