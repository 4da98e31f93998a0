package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// NodeUnpublishVolume unmounts the volume from a target path and removes what the driver made
// there.
func (d *Driver) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := req.GetVolumeId(), req.GetTargetPath()
	if err := required("volume_id", id, "target_path", target); err != nil {
		return nil, err
	}
	if _, err := d.Root.Relative(target); err != nil {
		return nil, err
	}
	err := d.ops.short("NodeUnpublishVolume", func() error {
		defer d.readers.exclude(id, "being unpublished")()
		return d.unpublish(ctx, id, target)
	}, id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (d *Driver) unpublish(ctx context.Context, id, target string) error {
	if r, ok := d.deferrals.at(id, target); ok {
		if err := d.undefer(id, r); err != nil {
			return err
		}
		d.audit(ctx, audit.Event{Action: audit.Taken, Volume: id, Target: target}, nil)
		return nil
	}
	t, err := d.Root.Target(target)
	if fault.Is(err, fault.NotFound) {
		d.users.forget(id, target)
		return d.published.remove(id, target)
	}
	if err != nil {
		return err
	}
	defer t.Close()
	src, findErr := d.releasing(id)
	readOnlyDevice := false
	const layers = 8 // of mounts on one target, left by interrupted calls
	for range layers {
		s, err := t.Look()
		if err != nil {
			return err
		}
		mounted := s.Occupant == mounter.MountPoint
		ours, dev := false, mounter.Device{}
		if mounted && findErr == nil {
			ours, dev, err = d.shows(s, src, id, target)
		}
		block := s.IsBlock()
		placeholder := false
		if err == nil && mounted && !ours {
			placeholder, err = s.Placeholder()
		}
		s.Close()
		switch {
		case err != nil:
			return err
		case !mounted:
			if err := t.Remove(); err != nil {
				return fmt.Errorf("volume %s: %w", id, err)
			}
			if err := failpoint.Err("unpublish.removed"); err != nil {
				return err
			}
			if err := d.published.remove(id, target); err != nil {
				return err
			}
			d.audit(ctx, audit.Event{Action: audit.Taken, Volume: id, Target: target}, nil)
			if readOnlyDevice {
				return d.releaseReadOnlyOf(ctx, src, id)
			}
			return nil
		case findErr != nil:
			return fmt.Errorf("%s is a mount point: %w; it was left alone: if the mount is not needed, `umount %s`",
				target, findErr, target)
		case placeholder && !d.deferrals.hasTarget(target): // the record of this deferral was lost
			r := deferral{VolumeID: id, Target: target}
			if len(d.deferrals.of(id)) == 0 { // else other readers have the device
				if err := d.releasedBySandbox(id, r); err != nil {
					return err
				}
			}
			if err := d.removePlaceholder(r); err != nil {
				return err
			}
			d.audit(ctx, audit.Event{Action: audit.Taken, Volume: id, Target: target}, nil)
			return nil
		case !ours:
			return fault.New(fault.State, "volume %s: what is mounted at %s is not of this volume; it was left alone", id, target)
		}
		if block {
			a, ok, err := src.Attached(id)
			readOnlyDevice = readOnlyDevice || err != nil || !ok || !dev.Same(a.Device)
		}
		if err := t.Unmount(); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		if err := failpoint.Err("unpublish.unmounted"); err != nil {
			return err
		}
	}
	return fault.New(fault.State, "volume %s: more than %d mounts lie on %s; `umount` them by hand", id, layers, target)
}
