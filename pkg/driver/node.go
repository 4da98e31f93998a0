package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// NodeGetCapabilities returns the node service's capabilities.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	types := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	}
	if d.AppliesGroups {
		types = append(types, csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP)
	}
	if d.Defers {
		types = append(types, crust.NodeCapability, crust.SubPathCapability)
	}
	for _, t := range types {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

// NodeGetInfo returns this node's id and topology.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.NodeID, AccessibleTopology: d.segments()}, nil
}

// Ready returns nil if every pool is usable. It does not wait for a disk that hangs.
func (d *Driver) Ready() error {
	var errs []error
	for _, p := range d.Volumes.Pools() {
		errs = append(errs, d.usable(context.Background(), p))
	}
	if err := errors.Join(errs...); err != nil {
		return fault.New(fault.State, "not ready: %w", err)
	}
	return nil
}

// look opens the target and reads what is there. The caller closes both.
func (d *Driver) look(path string) (*mounter.Target, *mounter.State, error) {
	t, err := d.Root.Target(path)
	if err != nil {
		return nil, nil, err
	}
	s, err := t.Glance()
	if err != nil {
		t.Close()
		return nil, nil, err
	}
	return t, s, nil
}

// shows tells whether the mount at a target is the volume's, and of which of its devices (the zero
// Device for a share).
func (d *Driver) shows(s *mounter.State, src volume.Releaser, id, target string) (bool, mounter.Device, error) {
	if s.Occupant != mounter.MountPoint {
		return false, mounter.Device{}, nil
	}
	dev, ok, err := s.Device()
	if err != nil {
		if r, staged := d.staged.get(id); staged && r.Share == "" && dev.Path == r.Device.Path {
			return true, r.Device, nil
		}
		return false, mounter.Device{}, fmt.Errorf("volume %s: %w", id, err)
	}
	if ok {
		dev, err = rawdevice.Below(dev)
		owner, owned := "", false
		if err == nil {
			err = failpoint.Err("owner.asked")
		}
		if err == nil {
			owner, owned, err = src.Owns(dev)
		}
		if err != nil {
			// A mounted device cannot be bound to anything else. So it is still what it was at
			// stage.
			if r, ok := d.staged.get(id); ok && r.Share == "" && r.Device.Same(dev) {
				return true, dev, nil
			}
			err = fmt.Errorf("volume %s: whether the device %d:%d is its own cannot be told: %w", id, dev.Major, dev.Minor, err)
		}
		return owned && owner == id, dev, err
	}
	share := ""
	if r, staged := d.staged.get(id); staged {
		share = r.Share
	} else if a, ok, err := src.Attached(id); err == nil && ok && a.Share != nil {
		share = a.Share.Source // the staged record is unreadable
	}
	if share == "" {
		return false, mounter.Device{}, nil
	}
	m, err := s.Mount()
	return err == nil && (sameShare(m.Source, share) || isShare(m.Source) && d.published.noted(id, target)), mounter.Device{}, err
}

// shownAt tells whether the kernel shows the volume at a target. look is the error of reading the
// target, compare of the comparison.
func (d *Driver) shownAt(src volume.Releaser, id, path string) (ok bool, look, compare error) {
	t, s, look := d.look(path)
	if look != nil {
		return false, look, nil
	}
	defer t.Close()
	defer s.Close()
	ok, _, compare = d.shows(s, src, id, path)
	return ok && compare == nil, nil, compare
}

// mountedHere tells whether the kernel shows the volume at one of its targets. Unknown counts as
// no.
func (d *Driver) mountedHere(src volume.Releaser, id string) bool {
	d.identify(src, id)
	return slices.ContainsFunc(d.published.of(id), func(path string) bool {
		ok, _, _ := d.shownAt(src, id, path)
		return ok
	})
}

// publishedAt returns the targets where the volume is mounted now. It drops entries of the index
// that the kernel refutes.
func (d *Driver) publishedAt(src volume.Releaser, id string) []string {
	targets := d.identify(src, id)
	for _, path := range d.published.of(id) {
		ok, look, compare := d.shownAt(src, id, path)
		switch {
		case ok || compare != nil, look != nil && !fault.Is(look, fault.NotFound):
			targets = append(targets, path) // unknown is not "no"
		default:
			d.published.forget(id, path)
		}
	}
	return targets
}

// identify looks again at the mounts that could not be attributed when this process started: their pool was away, or is no longer
// configured. It adds those of the volume to the index, and returns those that may be the volume's.
func (d *Driver) identify(src volume.Releaser, id string) (doubtful []string) {
	for _, m := range d.published.unidentifiedMounts() {
		dev, ok, err := m.Device()
		if _, gone := os.Lstat(m.Path); errors.Is(gone, fs.ErrNotExist) {
			d.published.forgetMount(m.Path)
		}
		if err != nil || !ok {
			continue
		}
		owner := ""
		if dev, err = rawdevice.Below(dev); err == nil {
			owner, ok, err = src.Owns(dev)
		}
		switch {
		case err != nil:
			doubtful = append(doubtful, m.Path)
		case ok && owner == id:
			d.published.attribute(id, m.Path)
		}
	}
	return doubtful
}

// identifyWithin is identify for callers that must not wait for a disk that hangs.
func (d *Driver) identifyWithin(ctx context.Context, id string) {
	if len(d.published.unidentifiedMounts()) == 0 {
		return
	}
	if pool, ok := d.Volumes.OwnerOf(id); ok {
		_, _ = askPool(ctx, d, pool, func() (struct{}, error) { d.identify(pool, id); return struct{}{}, nil }) // the next look tries again
	} else if d.Left != nil {
		if left := d.Left(id); left != nil {
			d.identify(left, id)
		}
	}
}

// releasing returns the source of a volume for its release. The kernel knows what is attached and
// mounted. So the volume can be released although its record is unusable, its pool is not
// configured, or the pool has no such id any more.
func (d *Driver) releasing(id string) (volume.Releaser, error) {
	err := d.Volumes.CheckPool(id)
	if err == nil {
		var src volume.Source
		if src, _, err = d.Volumes.Find(id); err == nil || errors.Is(err, volume.ErrUnusable) {
			return src, nil
		}
		if !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Unavailable) {
			return nil, err
		}
	}
	if d.Left != nil {
		if left := d.Left(id); left != nil {
			return left, nil
		}
	}
	return nil, err
}

// requireStaged returns how the volume is staged, and its attachment.
func (d *Driver) requireStaged(src volume.Source, id, stagingPath string) (stagedRecord, volume.Attachment, error) {
	if err := d.staged.unusable(id); err != nil {
		return stagedRecord{}, volume.Attachment{}, err
	}
	r, ok := d.staged.get(id)
	if !ok {
		return r, volume.Attachment{}, fault.New(fault.State, "volume %s is not staged on this node; call NodeStageVolume first", id)
	}
	if stagingPath != "" && stagingPath != r.StagingPath {
		return r, volume.Attachment{}, fault.New(fault.State, "volume %s is staged at %s, not at %s", id, r.StagingPath, stagingPath)
	}
	a, ok, err := src.Attached(id)
	if err != nil {
		return r, a, err
	}
	if !ok {
		return r, a, fault.New(fault.State, "volume %s: its device is gone (somebody detached it); unstage and stage it again", id)
	}
	if a.Share == nil && !a.Device.Same(r.Device) {
		return r, a, fault.New(fault.State, "volume %s was staged with device %d:%d, and %s is %d:%d now; unstage and stage it again", id,
			r.Device.Major, r.Device.Minor, a.Device.Path, a.Device.Major, a.Device.Minor)
	}
	return r, a, nil
}

// busy tells whether somebody uses the volume's device. The driver's own looks do not count.
func (d *Driver) busy(id, device string) (bool, error) {
	busy, err := mounter.Busy(device)
	if err != nil {
		return false, volume.OfDevice(id, err)
	}
	if !busy {
		return false, nil
	}
	defer d.readers.exclude(id, "being looked at for who uses it")()
	return mounter.Busy(device)
}

// growth makes a volume's file system fill its device, if due. It runs before anything can see the
// volume, or while it is in use.
func (d *Driver) growth(ctx context.Context, src volume.Source, id string, fs mounter.Filesystem) error {
	dev, fstype := fs.Device, fs.Type
	v, err := src.Get(id)
	if err != nil || !v.Facts.GrowDue || dev.ReadOnly {
		return err
	}
	_, end := tracing.Begin(ctx, "grow file system", tracing.Volume(id))
	err = growDetached(fs)
	if errors.Is(err, mounter.ErrGrowOffline) {
		end(nil) // no failure: a program does it, or it stays due
		busy, berr := d.busy(id, dev.Path)
		if berr != nil {
			return berr
		}
		if busy {
			return err
		}
		return d.growOffline(ctx, src, v, dev, fstype)
	}
	end(err)
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	return d.grown(ctx, src, v, fstype, "online")
}

func (d *Driver) growOffline(ctx context.Context, src volume.Source, v volume.Volume, dev mounter.Device, fsType string) error {
	if err := d.Programs.Grow(ctx, dev.Path, fsType); err != nil {
		return volume.OfDevice(v.ID, err)
	}
	return d.grown(ctx, src, v, fsType, "offline")
}

// grown records that a file system fills its device.
func (d *Driver) grown(ctx context.Context, src volume.Source, v volume.Volume, fstype, how string) error {
	d.Log.InfoContext(ctx, "file system grown", "volume_id", v.ID, "fs_type", fstype, "how", how)
	d.Metrics.FilesystemGrown(fstype, how)
	d.audit(ctx, audit.Event{Action: audit.Grown, Volume: v.ID, FSType: fstype, Result: how}, nil)
	facts := v.Facts
	facts.GrowDue = false
	return d.recordDone(ctx, src, v, facts)
}

// recordDone stores facts with the volume. If a full pool, or a full state directory, has no room for them, and they only say that
// something due was done, the volume is usable all the same: it is done again the next time, which changes nothing.
func (d *Driver) recordDone(ctx context.Context, src volume.Source, v volume.Volume, facts volume.Facts) error {
	err := src.SetFacts(v.ID, facts)
	struckOff := v.Facts
	struckOff.GrowDue = v.Facts.GrowDue && facts.GrowDue
	struckOff.IdentityDue = v.Facts.IdentityDue && facts.IdentityDue
	if (fault.Is(err, fault.NoSpace) || fault.Is(err, fault.Unavailable)) && facts == struckOff {
		d.Log.WarnContext(ctx, "what was done to the volume could not be noted", "volume_id", v.ID, "err", err)
		return nil
	}
	return err
}

func growDetached(fs mounter.Filesystem) error {
	m, err := mounter.Open(fs)
	if err != nil {
		return err
	}
	defer m.Close()
	dir, err := m.Dir()
	if err != nil {
		return err
	}
	defer dir.Close()
	return mounter.Grow(dir, fs.Type, fs.Device)
}
