package mounter

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// A path may lead to another disk by the time it is mounted. Numbers tell.
func TestD03_AnotherDeviceIsNotMounted(t *testing.T) {
	for _, name := range filesystems {
		if fstype.Of(name).Numberless {
			continue // it shows a number that belongs to no device
		}
		one, two := formatted(t, name), formatted(t, name)
		mixed := Device{Path: two.Path, Major: one.Major, Minor: one.Minor}
		if m, err := Open(Filesystem{Device: mixed, Type: name}); !fault.Is(err, fault.State) {
			t.Errorf("%s: %v", name, err)
			if err == nil {
				check(t, m.Close())
			}
		}
		if busy, err := Busy(two.Path); busy || err != nil {
			t.Errorf("%s: %s is in use: %v", name, two.Path, err)
		}
		m, err := Open(Filesystem{Device: two, Type: name})
		check(t, err)
		check(t, m.Close())
	}
}
