package driver

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// NodeExpandVolume makes the file system fill an enlarged device.
func (d *Driver) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := required("volume_id", id, "volume_path", path); err != nil {
		return nil, err
	}
	r := req.GetCapacityRange()
	if r.GetRequiredBytes() < 0 || r.GetLimitBytes() < 0 || r.GetLimitBytes() > 0 && r.GetRequiredBytes() > r.GetLimitBytes() {
		return nil, invalid("capacity_range: required_bytes %d, limit_bytes %d", r.GetRequiredBytes(), r.GetLimitBytes())
	}
	if _, err := d.found(ctx, id); err != nil {
		return nil, err
	}
	if len(d.deferrals.of(id)) > 0 {
		var resp *csi.NodeExpandVolumeResponse
		err := d.ops.long(ctx, "NodeExpandVolume", func(ctx context.Context, _ *volume.Progress) error {
			r, deferred, err := d.deferredAt(id, path)
			if err == nil && !deferred {
				err = fault.New(fault.Busy, "volume %s was unpublished just now; try again", id)
			}
			if err != nil {
				return err
			}
			resp, err = d.deferredExpand(ctx, r, req)
			return err
		}, id)
		if err != nil {
			return nil, err
		}
		return resp, nil
	}
	var size int64
	grow := func(ctx context.Context, _ *volume.Progress) error {
		src, _, err := d.Volumes.Find(id)
		if err == nil {
			err = d.notDeferred(id)
		}
		if err == nil {
			size, err = d.expand(ctx, src, id, path, r)
		}
		return err
	}
	var err error
	if pool, ok := d.Volumes.OwnerOf(id); ok && d.NodesExpand {
		err = d.inPool(ctx, "NodeExpandVolume", pool, grow, id)
	} else {
		err = d.ops.long(ctx, "NodeExpandVolume", grow, id)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, nil
}

func (d *Driver) expand(ctx context.Context, src volume.Source, id, path string, r *csi.CapacityRange) (int64, error) {
	staged, ok := d.staged.get(id)
	if !ok {
		return 0, fault.New(fault.NotFound, "volume %s is not staged on this node", id)
	}
	if staged.StagingPath != path {
		s, err := d.at(src, id, path)
		if err != nil {
			return 0, err
		}
		s.Close()
	}
	a, ok, err := src.Attached(id)
	if err != nil {
		return 0, err
	}
	if !ok {
		return 0, fault.New(fault.State, "volume %s: its device is gone; unstage and stage it again", id)
	}
	if a.Share != nil {
		return 0, nil // its server decides
	}
	if err := d.enlargeHere(ctx, src, id, r); err != nil {
		return 0, err
	}
	size, err := mounter.DeviceSize(a.Device)
	if err != nil {
		return 0, err
	}
	if err := inRange(id, size, r); err != nil {
		return 0, err
	}
	if staged.Block {
		return size, nil
	}
	return size, d.growNow(ctx, src, id, a.Device, staged)
}

// inRange refuses a device whose size, in bytes, is outside the requested range.
func inRange(id string, size int64, r *csi.CapacityRange) error {
	if want := r.GetRequiredBytes(); size < want {
		return fault.New(fault.OutOfRange, "volume %s: its device has %d bytes, %d were asked for; enlarge the device, then try again", id,
			size, want)
	}
	if limit := r.GetLimitBytes(); limit > 0 && size > limit {
		return fault.New(fault.OutOfRange, "volume %s: its device has %d bytes, more than the limit of %d: volumes do not shrink", id, size,
			limit)
	}
	return nil
}

func (d *Driver) growNow(ctx context.Context, src volume.Source, id string, dev mounter.Device, staged stagedRecord) error {
	v, err := src.Get(id)
	if err != nil {
		return err
	}
	if err := mounter.NeverGrows(staged.FSType); err != nil {
		if _, ours := d.Volumes.OwnerOf(id); ours {
			return nil // nobody has enlarged its device
		}
		return fmt.Errorf("volume %s: %w", id, err)
	}
	if !v.Facts.GrowDue {
		// A static device may have grown without the driver's knowledge.
		v.Facts.GrowDue = true
		if err := src.SetFacts(id, v.Facts); err != nil {
			return err
		}
	}
	if err := d.withheldHere(src, id, "grown"); err != nil {
		return err
	}
	fs, err := d.live(dev, id, staged.FSType)
	if err != nil {
		return err
	}
	err = d.growth(ctx, src, id, fs)
	if errors.Is(err, mounter.ErrGrowOffline) {
		return fmt.Errorf("volume %s: the device is larger now, its file system is not: %w", id, err)
	}
	return err
}
