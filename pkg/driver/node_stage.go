package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// NodeStageVolume attaches the volume's device and ensures that it holds the requested file system.
// It mounts nothing.
func (d *Driver) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := required("volume_id", id, "staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	attrs, err := parseAttributes(req.GetVolumeContext(), d.Volumes.Static())
	if err != nil {
		return nil, err
	}
	if _, err := d.group(req.GetVolumeCapability(), attrs); err != nil {
		return nil, err
	}
	static := d.Volumes.Static()
	share := static != nil && static.Shared(req.GetVolumeContext())
	u, err := parseUse(req.GetVolumeCapability(), share)
	if err != nil {
		return nil, err
	}
	u.hostMayMount = attrs.HostMayMount
	if err := d.checkStagingPath(req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	err = d.ops.long(ctx, "NodeStageVolume", func(ctx context.Context, progress *volume.Progress) error {
		src, v, err := d.Volumes.FindOrAdopt(id, req.GetVolumeContext())
		if err != nil {
			return err
		}
		_, repeated := d.staged.get(id)
		if err := d.stage(ctx, src, v, u, req.GetStagingTargetPath(), progress); err != nil {
			d.giveUp(src, id)
			return err
		}
		if !repeated {
			d.auditStaged(ctx, id, req)
		}
		return nil
	}, id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// giveUp releases the device of a static volume that could not be staged, for another volume.
func (d *Driver) giveUp(src volume.Source, id string) {
	static, ok := src.(volume.StaticSource)
	if _, staged := d.staged.get(id); staged || !ok {
		return
	}
	// How it is staged may be unknown. Then another call attached the device, and its pods go on.
	if len(d.publishedAt(static, id)) == 0 && len(d.deferrals.of(id)) == 0 {
		static.Release(id)
	}
}

func (d *Driver) checkStagingPath(path string) error {
	t, s, err := d.look(path)
	if err != nil {
		return err
	}
	defer t.Close()
	defer s.Close()
	switch s.Occupant {
	case mounter.EmptyDir, mounter.Data, mounter.MountPoint:
		return nil
	case mounter.Symlink:
		return invalid("staging_target_path %s is a symbolic link; it must be a directory", path)
	default:
		return fault.New(fault.State, "staging_target_path %s is no directory; the orchestrator makes it before it stages a volume", path)
	}
}

func (d *Driver) stage(
	ctx context.Context, src volume.Source, v volume.Volume, u use, path string, progress *volume.Progress,
) error {
	if err := d.staged.unusable(v.ID); err != nil {
		return err
	}
	have, staged := d.staged.get(v.ID)
	if staged {
		switch {
		case have.StagingPath != path:
			return fault.New(fault.Exists, "volume %s is staged at %s; it cannot be staged at %s too", v.ID, have.StagingPath, path)
		case have.Block != u.block:
			return fault.New(fault.Exists, "volume %s is staged as %s, and asked for as %s", v.ID, kindOf(have.Block, have.FSType),
				kindOf(u.block, u.fstype))
		case have.Mode != 0 && (have.Mode == singleWriter) != (u.mode == singleWriter):
			return fault.New(fault.Exists, "volume %s is staged with access mode %s, and asked for with %s", v.ID, have.Mode, u.mode)
		}
	}
	if err := d.notDeferred(v.ID); err != nil {
		if staged {
			return nil // unchanged, and not looked at while somebody else has it
		}
		return err
	}
	if v.Block && !u.block {
		return invalid("volume %s was created for block access; it has no file system to mount", v.ID)
	}
	actx, end := tracing.Begin(ctx, "attach device", tracing.Volume(v.ID))
	a, err := src.Attach(actx, v.ID)
	end(err)
	if err != nil {
		return err
	}
	if err := failpoint.Err("stage.attached"); err != nil {
		return err
	}
	// Attach may have found a device with more known facts.
	if v, err = src.Get(v.ID); err != nil {
		return err
	}
	r := stagedRecord{VolumeID: v.ID, StagingPath: path, Block: u.block, Mode: u.mode, Device: a.Device}
	if u.block && !v.Block && !v.Facts.GivenRaw {
		// From now on only a file system that is found there may be assumed of it.
		v.Facts.GivenRaw = true
		if err := src.SetFacts(v.ID, v.Facts); err != nil {
			return err
		}
	}
	switch {
	case a.Share != nil:
		r.Share, r.FSType = a.Share.Source, a.Share.Type
		if u.fstype != "" && u.fstype != r.FSType && fstype.Of(u.fstype).Like != r.FSType {
			return invalid("volume %s is a share of type %s, not %s", v.ID, r.FSType, u.fstype)
		}
	case !u.block:
		if r.FSType, err = d.ensureFilesystem(ctx, src, v, a.Device, u, progress); err != nil {
			return err
		}
		r.Superblock, r.HostMayMount = u.options.SuperblockString(), u.hostMayMount
		if staged {
			r.Superblock = have.Superblock // of the live mounts
		}
	}
	if err := failpoint.Err("stage.formatted"); err != nil {
		return err
	}
	if err := d.staged.put(r); err != nil {
		return err
	}
	if !staged { // later users were told of its earlier losses
		d.lost.forget(v.ID)
	}
	return nil
}

// ensureFilesystem returns the type of the file system that the device holds afterwards: the
// requested one, or an error.
func (d *Driver) ensureFilesystem(
	ctx context.Context, src volume.Source, v volume.Volume, dev mounter.Device, u use, progress *volume.Progress,
) (string, error) {
	want := u.fstype
	for _, t := range []string{v.Facts.Formatted, v.FSType, fstype.Default()} {
		if want == "" {
			want = t
		}
	}
	want = fstype.Kernel(want)
	if err := checkOptions(want, u.options); err != nil {
		return "", fmt.Errorf("volume %s: %w", v.ID, err)
	}
	var found superblock.Result
	var blank superblock.BlankDevice
	var err error
	switch {
	case v.Facts.Formatting != nil:
		if err := waitForMkfs(ctx, v.ID, dev); err != nil {
			return "", err
		}
		found, blank, err = d.resume(v, dev)
	case v.Facts.Formatted != "":
		found, err = superblock.Identify(dev.Path, v.Facts.Formatted)
	default:
		found, err = superblock.ProbeDevice(dev.Path)
	}
	if err != nil {
		return "", volume.OfDevice(v.ID, err)
	}
	if v.Facts.GivenToGuest && !u.hostMayMount && found.Content == superblock.Known && found.Type == want {
		// For the next guest. This node reads no further.
		return want, nil
	}
	facts := v.Facts
	if err := d.mayFormat(v, dev, found, blank); err != nil {
		return "", err
	}
	if found.Content == superblock.Blank {
		blank = superblock.BlankDevice{} // that of an earlier format
	}
	if found.Content == superblock.Blank && v.Facts.Formatted == "" {
		pctx, end := tracing.Begin(ctx, "prove that the device is blank", tracing.Volume(v.ID))
		found, blank, err = volume.ProveBlank(pctx, src, v.ID, dev, progress)
		end(err)
		if err != nil {
			return "", volume.OfDevice(v.ID, err)
		}
	}
	if blank.Path() != "" {
		if found, err = d.format(ctx, src, v, dev, want, blank); err != nil {
			return "", err
		}
		facts = volume.Facts{Formatted: want}
	}
	if found.Content == superblock.Blank {
		return "", fault.New(fault.State,
			"volume %s was formatted with %s before, and %s reads as blank now: its data was lost or overwritten. "+
				"It is not formatted a second time: %s", v.ID, v.Facts.Formatted, dev.Path, d.wayOut(v.ID, dev, want))
	}
	if found.Content != superblock.Known {
		return "", fault.New(fault.State,
			"volume %s: %s holds %s. It is neither blank nor the %s that was asked for, so it was not touched: "+
				"look at it with `wipefs -n %s` and `hexdump -C %s | head`; if its data may go, delete the volume (or wipe the device) and create it anew",
			v.ID, dev.Path, found, want, dev.Path, dev.Path)
	}
	if found.Type != want {
		return "", fault.New(fault.State,
			"volume %s: %s holds %s, and %s was asked for; nothing was changed: ask for %s, or use another volume",
			v.ID, dev.Path, found.Type, want, found.Type)
	}
	facts.Formatting, facts.Formatted = nil, found.Type
	busy, err := d.busy(v.ID, dev.Path)
	if err != nil {
		return "", err
	}
	if !busy && !dev.ReadOnly {
		if facts, err = d.prepareUnmounted(ctx, v, dev, found, facts); err != nil {
			return "", err
		}
	}
	if facts != v.Facts {
		if err := d.recordDone(ctx, src, v, facts); err != nil {
			return "", err
		}
	}
	return want, d.growEarly(ctx, src, v.ID, dev, want, busy)
}

// waitForMkfs waits for a mkfs that outlived its driver.
func waitForMkfs(ctx context.Context, id string, dev mounter.Device) error {
	const patience = 30 * time.Second
	for begin := time.Now(); ; {
		busy, err := mounter.Busy(dev.Path)
		if err != nil || !busy {
			return err
		}
		if time.Since(begin) > patience || ctx.Err() != nil {
			return fault.New(fault.Busy, "volume %s: %s is being formatted by a program that an earlier driver started; try again",
				id, dev.Path)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// format formats a device that was proven blank, and records that before and
// after.
func (d *Driver) format(
	ctx context.Context, src volume.Source, v volume.Volume, dev mounter.Device, name string, blank superblock.BlankDevice,
) (superblock.Result, error) {
	var none superblock.Result
	if dev.ReadOnly {
		return none, fault.New(fault.State, "volume %s: %s is blank and read-only, so it cannot be formatted", v.ID, dev.Path)
	}
	if len(fstype.Of(name).Make) == 0 {
		return none, invalid("volume %s: %s is blank, and this driver cannot make a file system of type %s", v.ID, dev.Path, name)
	}
	event := audit.Event{Action: audit.Formatted, Volume: v.ID, Device: dev.Path, FSType: name}
	err := volume.MakeFilesystem(ctx, src, v, blank, name, func() error {
		if err := failpoint.Err("format.intended"); err != nil {
			return err
		}
		if err := d.irreversible(ctx, event, func() error { return d.Programs.Format(ctx, blank, name, v.Thick) }); err != nil {
			return volume.OfDevice(v.ID, err)
		}
		return failpoint.Err("format.done")
	})
	if err != nil {
		return none, err
	}
	d.Metrics.FilesystemMade(name)
	d.Log.InfoContext(ctx, "formatted", "volume_id", v.ID, "device", dev.Path, "fs_type", name)
	found, err := superblock.ProbeDevice(dev.Path)
	if err != nil {
		return none, volume.OfDevice(v.ID, err)
	}
	return found, nil
}

// prepareUnmounted prepares an unmounted file system for use: it runs a check if the file system asks for one,
// and gives a copy another identity. It finds out whether it fills its device.
func (d *Driver) prepareUnmounted(
	ctx context.Context, v volume.Volume, dev mounter.Device, found superblock.Result, facts volume.Facts,
) (volume.Facts, error) {
	if found.NeedsCheck != "" {
		if err := d.check(ctx, v, dev, found); err != nil {
			return facts, err
		}
	}
	if facts.IdentityDue {
		if err := d.Programs.NewID(ctx, dev.Path, found.Type); err != nil {
			return facts, volume.OfDevice(v.ID, err)
		}
		facts.IdentityDue = false
	}
	size, err := mounter.DeviceSize(dev)
	if err != nil {
		return facts, volume.OfDevice(v.ID, err)
	}
	row := fstype.Of(found.Type)
	if len(row.Make) > 0 && mounter.Unfilled(found, size) {
		facts.GrowDue = true
	}
	facts.GrowDue = facts.GrowDue && row.Grows()
	return facts, nil
}

// growEarly grows a file system at stage if this process may not let the kernel do it at publish.
func (d *Driver) growEarly(ctx context.Context, src volume.Source, id string, dev mounter.Device, name string, busy bool) error {
	if busy || !mounter.GrowsOffline(name) {
		return nil
	}
	v, err := src.Get(id)
	if err != nil || !v.Facts.GrowDue || dev.ReadOnly {
		return err
	}
	err = d.growOffline(ctx, src, v, dev, name)
	if errors.Is(err, mounter.ErrGrowRefused) { // its files are all there, as before; the growth stays due
		d.Log.WarnContext(ctx, "a volume has not its new size yet", "volume_id", id, "error", err)
		return nil
	}
	return err
}
