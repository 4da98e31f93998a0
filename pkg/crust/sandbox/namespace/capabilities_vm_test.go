//go:build vm

package namespace

import (
	"slices"
	"testing"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// C17: a file system that no kernel grows in use takes nothing from the others. Older agents know one
// answer for all. The guests' kernels mount all that can be made.
func TestC17_OneThatNeverGrowsInUseTakesNothingFromOthers(t *testing.T) {
	b, err := New(t.TempDir(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, name := range fstype.Formats() {
		if row := fstype.Of(name); !b.Mounts(name) || b.Grows(name) != (row.Grow != nil) {
			t.Errorf("%s: mounts %v, grows %v", name, b.Mounts(name), b.Grows(name))
		}
	}
	if got := b.Capabilities(); !slices.Contains(got, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE) {
		t.Errorf("without growth: %v", got)
	}
}
