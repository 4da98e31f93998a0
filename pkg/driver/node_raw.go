package driver

import (
	"context"
	"errors"
	"fmt"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// rawDevice prepares the mount of a device node.
func (d *Driver) rawDevice(ctx context.Context, p *publication) (*mounter.Detached, error) {
	dev := p.attachment.Device
	var err error
	if p.readOnly {
		if dev, err = p.src.AttachReadOnly(ctx, p.id); err != nil {
			return nil, err
		}
		err = failpoint.Err("publish.readonly")
	}
	if err == nil {
		dev, err = p.src.ForPod(ctx, p.id, dev)
	}
	if err == nil {
		err = failpoint.Err("publish.forpod")
	}
	if err == nil {
		var m *mounter.Detached
		if m, err = mounter.OpenDevice(dev); err == nil {
			return m, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("volume %s: %w", p.id, err), d.releaseReadOnly(ctx, p))
}

// releaseReadOnly releases the read-only devices of a block volume that no target shows.
func (d *Driver) releaseReadOnly(ctx context.Context, p *publication) error {
	if !p.use.block || !p.readOnly {
		return nil
	}
	return d.releaseReadOnlyOf(ctx, p.src, p.id)
}

func (d *Driver) releaseReadOnlyOf(ctx context.Context, src volume.Releaser, id string) error {
	pool, now, err := d.calledNow(src, id)
	if err != nil {
		return err
	}
	if now != id { // pods may have devices of it under either id
		return d.ops.short("NodeUnpublishVolume of "+id, func() error { return d.releaseReadOnlyOf(ctx, pool, now) }, now)
	}
	a, ok, err := src.Attached(id)
	if r, staged := d.staged.get(id); fault.Is(err, fault.State) && staged && r.Share == "" {
		a.Device, ok, err = r.Device, true, nil // its disk was pulled: what is on it must go all the same
	}
	if err != nil || !ok {
		return err
	}
	var inUse []mounter.Device
	for _, path := range d.publishedAt(src, id) {
		t, s, err := d.look(path)
		if err != nil {
			return err
		}
		_, dev, err := d.shows(s, src, id, path)
		s.Close()
		t.Close()
		if err != nil {
			return err
		}
		if !dev.Same(a.Device) {
			inUse = append(inUse, dev)
		}
	}
	return src.DetachReadOnly(ctx, id, inUse)
}
