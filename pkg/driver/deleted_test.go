package driver

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// deletes is a pool that forgets its volume, and fails once after that.
type deletes struct {
	volume.Pool
	gone, failed bool
}

func (*deletes) Sizes() volume.Sizes { return volume.FileSizes() }
func (*deletes) Name() string        { return "pool" }

func (*deletes) Recover(volume.Thaw) error { return nil }

func (*deletes) Usable() error { return nil }

func (*deletes) Attached(string) (volume.Attachment, bool, error) {
	return volume.Attachment{}, false, nil
}

func (p *deletes) Get(id string) (volume.Volume, error) {
	if p.gone {
		return volume.Volume{}, fault.New(fault.NotFound, "volume %s does not exist", id)
	}
	return volume.Volume{ID: id}, nil
}

func (p *deletes) Delete(context.Context, string) error {
	p.gone = true
	if p.failed {
		return nil
	}
	p.failed = true
	return io.ErrUnexpectedEOF
}

// D03: a deleted volume leaves nothing in memory: not what its check found, which a refused stage leaves, as no unstage follows that; not
// which writes it lost. A first delete that removed the record and failed then changes nothing.
func TestD03_ADeletedVolumeIsForgotten(t *testing.T) {
	root, err := mounter.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	registry, err := volume.NewRegistry(nil, &deletes{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(Config{Name: "x", NodeID: "n", StateDir: t.TempDir(), Root: root, Volumes: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drain(t.Context())
	id := volume.VolumeID("pool", "v")
	d.damaged.put(id, damage{fingerprint: "f"})
	d.lost.note(id, volume.ErrWritesLost)
	for _, want := range []error{io.ErrUnexpectedEOF, nil} {
		if _, err := d.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); !errors.Is(err, want) {
			t.Fatalf("deleted: %v", err)
		}
	}
	if _, ok := d.damaged.get(id); ok {
		t.Error("what its check found is kept")
	}
	if lost := d.lost.all(); len(lost) > 0 {
		t.Errorf("lost writes of %q are shown", lost)
	}
}
