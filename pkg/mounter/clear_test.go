package mounter_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// D04: only a mount of the named device is taken off, and only what is empty is removed.
func TestD04_ClearLeavesAloneWhatIsNotTheDevices(t *testing.T) {
	device, target := deviceAndTarget(t)
	path := target.Path
	check(target.Clear(device)) // nothing is there
	for _, directory := range []bool{true, false} {
		if directory {
			check(os.Mkdir(path, 0o755))
		} else {
			check(os.WriteFile(path, nil, 0o644))
		}
		check(target.Clear(device))
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("directory %t: %v", directory, err)
		}
	}
	check(os.Mkdir(path, 0o755))
	check(os.WriteFile(filepath.Join(path, "precious"), nil, 0o644))
	refusedHere := func(what string, device mounter.Device) {
		t.Helper()
		if err := target.Clear(device); !fault.Is(err, fault.State) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refusedHere("data", device)
	check(os.Remove(filepath.Join(path, "precious")))

	for what, open := range map[string]func() (*mounter.Detached, error){
		"a file system": func() (*mounter.Detached, error) {
			return mounter.Open(mounter.Filesystem{Device: device, Type: "ext4"})
		},
		"a device node": func() (*mounter.Detached, error) {
			check(os.Remove(path))
			return mounter.OpenDevice(device)
		},
	} {
		m, err := open()
		check(err)
		check(m.Attach(target))
		check(m.Close())
		other := device
		other.Minor++
		refusedHere(what+" of another device", other)
		refusedHere(what+" of nothing", mounter.Device{})
		if shown, err := target.Shows(device); !shown || err != nil {
			t.Errorf("%s: %t, %v", what, shown, err)
		}
		check(target.Clear(device))
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s: %v", what, err)
		}
		if shown, err := target.Shows(device); shown || err != nil {
			t.Errorf("%s, cleared: %t, %v", what, shown, err)
		}
		check(os.Mkdir(path, 0o755))
	}
	check(os.Remove(path))
}
