package journal

import (
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Records implements the methods of a pool that need only its records. A pool embeds it.
type Records struct {
	volumes   *Book[VolumeRecord]
	snapshots *Book[SnapshotRecord]
}

// NewRecords returns the Records of a pool.
func NewRecords(volumes *Book[VolumeRecord], snapshots *Book[SnapshotRecord]) Records {
	return Records{volumes, snapshots}
}

// Get returns a volume.
func (r Records) Get(id string) (volume.Volume, error) {
	_, v, err := r.volumes.Find(id)
	return v.Volume, err
}

// List returns all finished volumes, by id.
func (r Records) List() []volume.Volume {
	list := []volume.Volume{}
	for _, v := range r.volumes.Ready() {
		list = append(list, v.Volume)
	}
	return list
}

// SetFacts stores the facts with the volume. It writes nothing if they are stored already.
func (r Records) SetFacts(id string, facts volume.Facts) error {
	key, v, err := r.volumes.Find(id)
	if err != nil {
		return err
	}
	if v.Volume.Facts == facts {
		return nil
	}
	v.Volume.Facts = facts
	return r.volumes.Put(key, v)
}

// GetSnapshot returns a snapshot. One that is being deleted is a fault NotFound.
func (r Records) GetSnapshot(id string) (volume.Snapshot, error) {
	_, s, err := r.snapshots.Find(id)
	if fault.Is(err, fault.Busy) {
		err = fault.New(fault.NotFound, "%w", err)
	}
	return s.Snapshot, err
}

// ListSnapshots returns all finished snapshots, by id.
func (r Records) ListSnapshots() []volume.Snapshot {
	list := []volume.Snapshot{}
	for _, s := range r.snapshots.Ready() {
		list = append(list, s.Snapshot)
	}
	return list
}
