package kata_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// C19: a microVM has a device, and the record of its sandbox cannot be used. No other one gets the device: a hypervisor has it open without
// O_EXCL, so the kernel does not call it busy.
func TestC19_KataADeviceOfASandboxWhoseRecordCannotBeUsed(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, _, _ := w.pod("a")
	endHypervisor := opened(t, d.Path, os.O_RDWR)
	w.server.Stop()
	files, err := filepath.Glob(filepath.Join(w.state, "sandboxes", "*.json"))
	check(t, err)
	if len(files) != 1 {
		t.Fatalf("%q", files)
	}
	check(t, os.WriteFile(files[0], []byte("{"), 0o600))
	w.start()
	w.ids = nil // "a" is not listed any more
	w.sandbox("b")
	_, err = w.publish(w.request("b", d))
	wants(t, "a device that another microVM has", err, fault.State, "may be in that of a sandbox whose record cannot be used")
	endHypervisor()
}
