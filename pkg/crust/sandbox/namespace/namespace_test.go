package namespace

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// C11: without a directory, nothing is made and mounted in the current one.
func TestC11_ABackendWantsItsDirectories(t *testing.T) {
	for _, dirs := range [][2]string{{"", "/var/lib/kubelet"}, {t.TempDir(), ""}} {
		if _, err := New(dirs[0], dirs[1]); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", dirs, err)
		}
	}
}
