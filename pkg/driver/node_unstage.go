package driver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// NodeUnstageVolume releases the volume's device, once its file system is mounted in no mount
// namespace.
func (d *Driver) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	if err := required("volume_id", id, "staging_target_path", path); err != nil {
		return nil, err
	}
	if _, err := d.Root.Relative(path); err != nil {
		return nil, err
	}
	err := d.ops.short("NodeUnstageVolume", func() error {
		defer d.readers.exclude(id, "being unstaged, and what was written to it last is written to its disk")()
		return d.unstage(ctx, id, path)
	}, id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (d *Driver) unstage(ctx context.Context, id, path string) error {
	r, staged := d.staged.get(id)
	if staged && r.StagingPath != path {
		return fault.New(fault.State, "volume %s is staged at %s, not at %s", id, r.StagingPath, path)
	}
	src, err := d.releasing(id)
	if fault.Is(err, fault.NotFound) {
		if staged {
			return d.staged.remove(id)
		}
		return nil // nothing of it is here
	}
	if err != nil {
		return err
	}
	if targets := d.publishedAt(src, id); len(targets) > 0 {
		return fault.New(fault.State, "volume %s is still published at %s; unpublish it first", id, targets[0])
	}
	if all := d.deferrals.of(id); len(all) > 0 {
		return fault.New(fault.State, "volume %s is still deferred to a runtime at %s; unpublish it first", id, targetsOf(all))
	}
	if err := d.detach(ctx, src, id); err != nil {
		if errors.Is(err, volume.ErrWritesLost) {
			d.noteLost(ctx, id, err)
		}
		return err
	}
	if err := failpoint.Err("unstage.detached"); err != nil {
		return err
	}
	d.damaged.forget(id)
	d.refused.note(id, nil) // whoever mounts it again requests the growth again
	if err := d.staged.remove(id); err != nil || !staged {
		return err
	}
	d.audit(ctx, audit.Event{Action: audit.Unstaged, Volume: id, Target: path}, nil)
	return nil
}
