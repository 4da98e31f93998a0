package volume_test

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// A device that is too small for a file system is refused before anything is recorded or run: a
// file system that fits may still be made there.
func TestADeviceThatIsTooSmallIsOutOfRange(t *testing.T) {
	d, id, a := attached(t)
	if least := fstype.Of("xfs").Minimum; least <= 128<<20 {
		t.Fatalf("xfs takes %d bytes", least)
	}
	_, blank, err := superblock.ProveBlank(t.Context(), a.Device.Path, superblock.Reading{})
	ok(t, err)
	programs := fsprogs.New(func(program string) { t.Errorf("%s was started", program) })
	if err := programs.Format(t.Context(), blank, "xfs", false); !fault.Is(err, fault.OutOfRange) {
		t.Errorf("%v, kind %v", err, fault.KindOf(err))
	}
	if err := programs.Format(t.Context(), superblock.BlankDevice{}, "xfs", false); !fault.Is(err, fault.State) {
		t.Errorf("no proof: %v, kind %v", err, fault.KindOf(err))
	}
	if err := volume.EnsureFilesystem(t.Context(), d, id, a.Device, "xfs", d, nil); !fault.Is(err, fault.OutOfRange) || d.formats > 0 {
		t.Errorf("%v, kind %v; formatted %d times", err, fault.KindOf(err), d.formats)
	}
	if v, err := d.Get(id); err != nil || v.Facts != (volume.Facts{}) {
		t.Errorf("on record: %+v, %v", v.Facts, err)
	}
	ok(t, volume.EnsureFilesystem(t.Context(), d, id, a.Device, "ext4", d, nil))
}
