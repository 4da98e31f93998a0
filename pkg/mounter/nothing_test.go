package mounter

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Without a mounted volume, no method returns a volume's directory: neither the node's own
// directory nor the working directory.
func TestWhatIsNotMountedHasNoDirectory(t *testing.T) {
	dir := t.TempDir()
	check(t, os.Mkdir(filepath.Join(dir, "empty"), 0o755))
	r, err := OpenRoot(dir)
	check(t, err)
	defer r.Close()
	for _, name := range []string{"empty", "absent"} {
		target, err := r.Target(filepath.Join(dir, name))
		check(t, err)
		defer target.Close()
		s, err := target.Look()
		check(t, err)
		for range 2 {
			d, err := s.Dir()
			if !fault.Is(err, fault.State) {
				t.Errorf("%s: %v, %v", name, d, err)
			}
			_, usageErr := s.Usage()
			_, mountErr := s.Mount()
			_, labelErr := s.Label()
			_, differsErr := s.Differs(Filesystem{})
			for what, err := range map[string]error{
				"usage": usageErr, "mount": mountErr, "label": labelErr, "differs": differsErr, "writes": s.WritesLost(),
			} {
				if err == nil {
					t.Errorf("%s: %s is told", name, what)
				}
			}
			s.Close() // check a closed State too
		}
	}
	if f, err := linux.Openat(nil, ".", os.O_RDONLY, 0); err == nil {
		t.Errorf("no descriptor is %s", f.Name())
	}
	if m, err := OpenTree(dir); !fault.Is(err, fault.State) {
		t.Errorf("a directory that is no mount point: %v, %v", m, err)
	}
}
