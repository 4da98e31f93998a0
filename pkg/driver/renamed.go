package driver

import (
	"context"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// calledNow returns the id that a volume has since its pool got another name, and its pool. Any other volume keeps its id and source.
func (d *Driver) calledNow(src volume.Releaser, id string) (volume.Releaser, string, error) {
	if _, ok := src.(volume.Source); ok {
		return src, id, nil // its pool is configured, or it is static
	}
	a, ok, err := src.Attached(id)
	if err != nil || !ok {
		return src, id, err
	}
	now, ok, err := volume.AvailableOwnerOfDevice(d.sources(), a.Device)
	if err != nil || !ok {
		return src, id, err
	}
	if pool, ok := d.Volumes.OwnerOf(now); ok {
		return pool, now, nil
	}
	return src, id, nil
}

// detach releases the devices of a volume, unless it is staged under another id, too: its pool got another name, and a PersistentVolume has
// the new one.
func (d *Driver) detach(ctx context.Context, src volume.Releaser, id string) error {
	pool, now, err := d.calledNow(src, id)
	if err != nil {
		return err
	}
	if now == id {
		return src.Detach(ctx, id)
	}
	return d.ops.short("NodeUnstageVolume of "+id, func() error {
		if _, staged := d.staged.get(now); staged || d.staged.unusable(now) != nil {
			return nil // its NodeUnstageVolume releases them
		}
		if targets := d.publishedAt(pool, now); len(targets) > 0 {
			return fault.New(fault.State, "volume %s, which is %s now, is in use: it is still published at %s; unpublish it first",
				id, now, targets[0])
		}
		return src.Detach(ctx, id)
	}, now)
}
