package driver

import (
	"context"
	"log/slog"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// mute is a pool that cannot tell which snapshots it has.
type mute struct {
	volume.Pool
	made bool
}

func (*mute) Sizes() volume.Sizes { return volume.FileSizes() }

func (*mute) Name() string { return "p" }
func (*mute) GetSnapshot(string) (volume.Snapshot, error) {
	return volume.Snapshot{}, fault.New(fault.Unavailable, "pool p has not answered")
}
func (p *mute) CreateSnapshot(context.Context, volume.SnapshotSpec, *volume.Progress) (volume.Snapshot, error) {
	p.made = true
	return volume.Snapshot{}, nil
}

// D11: a pool that does not answer may have the snapshot, so no new one is made.
func TestD11_ASnapshotThatMayBeThereIsNotMadeAgain(t *testing.T) {
	p := &mute{}
	r, err := volume.NewRegistry(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Driver{Config: Config{Log: log, Volumes: r}, readers: newReaders(log)}
	if _, err := d.snapshot(t.Context(), "s", volume.VolumeID("p", "v"), &volume.Progress{}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("%v", err)
	}
	if p.made {
		t.Error("it is made again")
	}
}
