package mounter

import (
	"crypto/sha256"
	"io"
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A path may lead to another disk by the time it is mounted. Numbers tell.
func TestD03_AnotherDeviceIsNotMounted(t *testing.T) {
	for _, name := range filesystems {
		one, two := formatted(t, name), formatted(t, name)
		before := head(t, two.Path)
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
		if head(t, two.Path) != before {
			t.Errorf("%s: the kernel has written to the other device", name)
		}
		m, err := Open(Filesystem{Device: two, Type: name})
		check(t, err)
		check(t, m.Close())
	}
}

// head returns a sum of the beginning of a device, where each file system notes that it was mounted.
func head(t *testing.T, path string) (sum [sha256.Size]byte) {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 2<<20))
	check(t, err)
	return sha256.Sum256(b)
}
