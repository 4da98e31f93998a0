package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// hostTarget runs f on the target in the host's mount namespace.
func (d *Driver) hostTarget(path string, f func(*mounter.Target) error) error {
	return d.HostNamespace.Do(func() error {
		root, err := mounter.OpenRoot(d.Root.Path())
		if err != nil { // never NotFound, which is about the target
			return fault.New(fault.State, "the host's mount namespace: %w", err)
		}
		defer root.Close()
		t, err := root.Target(path)
		if err != nil {
			return err
		}
		defer t.Close()
		return f(t)
	})
}

// notDeferred returns an error while a runtime has the volume.
func (d *Driver) notDeferred(id string) error {
	all := d.deferrals.of(id)
	if len(all) == 0 {
		return nil
	}
	return fault.New(fault.State, "volume %s is deferred to the runtime of the pod at %s (runtime-assisted mount): the node does not "+
		"mount, check or grow it until that pod is gone and the target is unpublished", id, targetsOf(all))
}

// wouldDefer returns the deferral for this publish, nil if the node mounts the volume itself.
func (d *Driver) wouldDefer(p *publication, supported []string) (*deferral, error) {
	if !p.attrs.AllowRuntimeAssistedMount || len(supported) == 0 || p.use.block {
		return nil, nil
	}
	if _, known := d.deferrals.at(p.id, p.target); !known { // what is deferred stays so though the driver defers no more
		if !d.Defers {
			return nil, nil
		}
		at := d.publishedAt(p.src, p.id)
		if slices.Contains(at, p.target) {
			return nil, nil // mounted before it could be deferred
		}
		if p.readOnly && len(at) > 0 {
			return nil, nil // a reader beside pods of this node uses their mount
		}
	}
	r := &deferral{VolumeID: p.id, Target: p.target}
	if share := p.attachment.Share; share != nil {
		r.Source, r.Type = share.Source, share.Type
	} else {
		// Use what is on the device, not what anybody claims (C03).
		found, err := superblock.Identify(p.attachment.Device.Path, p.staged.FSType)
		if err != nil {
			return nil, volume.OfDevice(p.id, err)
		}
		if found.Content != superblock.Known {
			return nil, fault.New(fault.State, "volume %s: %s holds %s, and was staged with %s", p.id, p.attachment.Device.Path, found,
				p.staged.FSType)
		}
		r.Source, r.Type = p.attachment.Device.Path, found.Type
	}
	if !slices.Contains(supported, r.Type) {
		return nil, nil // story 5
	}
	r.Options = crust.OptionMap(p.use.options.List())
	delete(r.Options, "rw")
	delete(r.Options, "defaults")
	if p.readOnly {
		r.Options["ro"] = ""
	}
	return r, nil
}

// deferTo leaves the volume to the pod's runtime.
func (d *Driver) deferTo(p *publication, want deferral) error {
	if p.attrs.hostKernel {
		if err := withheld(p.volume, p.attrs.HostMayMount, "mounted"); err != nil {
			return err // the sandbox mounts with this kernel
		}
	}
	have, known := d.deferrals.at(p.id, p.target)
	others := d.deferrals.of(p.id)
	switch {
	case known && have.bad != nil:
		return have.unusable()
	case known:
		if have.Source != want.Source || have.Type != want.Type || !maps.Equal(have.Options, want.Options) {
			return fault.New(fault.Exists, "volume %s is deferred to a runtime at %s in another way (%s %s %v, now asked for %s %s %v); "+
				"unpublish it first",
				p.id, have.Target, have.Type, have.Source, have.Options, want.Type, want.Source, want.Options)
		}
	case len(others) > 0:
		// Several readers are allowed. A busy device proves nothing then.
		if !want.readOnly() || slices.ContainsFunc(others, func(r deferral) bool { return !r.readOnly() }) {
			return d.notDeferred(p.id)
		}
		if err := d.deferrals.put(want); err != nil {
			return err
		}
	default:
		if others := d.publishedAt(p.src, p.id); len(others) > 0 {
			return fault.New(fault.State,
				"volume %s is published at %s by this node, so it cannot be deferred to another pod's runtime at the same time",
				p.id, others[0])
		}
		if p.attachment.Share == nil {
			busy, err := d.busy(p.id, p.attachment.Device.Path)
			if err != nil {
				return err
			}
			if busy {
				return fault.New(fault.State, "volume %s: %s is in use, so it cannot be deferred to a pod's runtime%s",
					p.id, p.attachment.Device.Path, mounter.HeldBy(p.attachment.Device).After("; "))
			}
		}
		if err := d.deferrals.put(want); err != nil {
			return err
		}
		failpoint.Hit("defer.recorded")
	}
	if err := d.hostTarget(p.target, func(t *mounter.Target) error {
		return mounter.AttachPlaceholder(t, p.attrs.subPaths...)
	}); err != nil {
		err = fmt.Errorf("volume %s: the placeholder at its target: %w", p.id, err)
		if known {
			return err
		}
		// No caller knows of this deferral, so no caller will end it.
		return errors.Join(err, d.deferrals.remove(want))
	}
	if err := failpoint.Err("defer.placed"); err != nil {
		return err
	}
	return d.noteGuest(p)
}

// leftByRuntime refuses to mount here what a sandbox may still have: a volume whose class allows
// deferral, which is in use though this node has published it nowhere.
func (d *Driver) leftByRuntime(p *publication) error {
	if !p.attrs.AllowRuntimeAssistedMount || p.use.block || p.attachment.Share != nil || len(d.publishedAt(p.src, p.id)) > 0 {
		return nil
	}
	busy, err := d.busy(p.id, p.attachment.Device.Path)
	if err == nil && busy {
		err = fault.New(fault.State,
			"volume %s: %s is still in use, by a sandbox that it was deferred to or by somebody else%s; the volume "+
				"is mounted when that has ended", p.id, p.attachment.Device.Path, mounter.HeldBy(p.attachment.Device).After("; "))
	}
	return err
}

func (r deferral) answer(resp *csi.NodePublishVolumeResponse) error {
	return crust.SetMountInfo(resp, crust.MountInfo{Source: r.Source, Type: r.Type, Options: r.Options})
}

// undefer removes the placeholder and the deferral. The volume was never mounted here. While the
// sandbox has it, nothing is touched: removing the target would remove the sandbox's mount, and
// others would get the volume.
//
// If other readers remain, the device proves nothing, but the volume stays theirs.
func (d *Driver) undefer(id string, r deferral) error {
	if len(d.deferrals.of(id)) == 1 {
		if err := d.releasedBySandbox(id, r); err != nil {
			return err
		}
	}
	if err := d.removePlaceholder(r); err != nil {
		return err
	}
	if err := failpoint.Err("undefer.removed"); err != nil {
		return err
	}
	return d.deferrals.remove(r)
}

// removePlaceholder removes the placeholder and the target of a deferral.
func (d *Driver) removePlaceholder(r deferral) error {
	err := d.hostTarget(r.Target, func(t *mounter.Target) error {
		s, err := t.Glance()
		if err != nil {
			return err
		}
		there, err := s.Placeholder()
		occupant := s.Occupant
		s.Close()
		switch {
		case err != nil:
			return err
		case there:
			if err := t.Unmount(); err != nil {
				return err
			}
		case occupant == mounter.MountPoint:
			return fault.New(fault.State,
				"%s has something mounted on it that is not the placeholder of a deferred volume; it was left alone", r.Target)
		}
		if err := failpoint.Err("undefer.unmounted"); err != nil {
			return err
		}
		return t.Remove()
	})
	if err != nil && !fault.Is(err, fault.NotFound) {
		return fmt.Errorf("volume %s: %w", r.VolumeID, err)
	}
	return nil
}

func (d *Driver) releasedBySandbox(id string, r deferral) error {
	var a volume.Attachment
	ok := false
	src, err := d.releasing(id)
	if err == nil {
		a, ok, err = src.Attached(id)
	}
	unknown := fault.Is(err, fault.NotFound)
	if s, staged := d.staged.get(id); (unknown || errors.Is(err, record.ErrUnusable)) && staged && s.Share == "" {
		a, ok, err = volume.Attachment{Device: s.Device}, true, nil
	} else if unknown {
		return nil
	}
	static := d.Volumes.Static()
	isStatic := static != nil && src == volume.Releaser(static)
	if err == nil && !ok && isStatic {
		a.Device, ok = static.Recall(id) // how it was staged is not known any more
	}
	var busy bool
	switch {
	case isStatic && (err == nil && !ok || fault.Is(err, fault.State) && !errors.Is(err, record.ErrUnusable)):
		// The disk was pulled, or came back under another name. The pod must be able to end all the same.
		busy, err = d.heldStatic(static, id)
	case err != nil || !ok || a.Share != nil:
		return err
	default:
		busy, err = d.busy(id, a.Device.Path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("volume %s: %w", id, err)
	case busy:
		return fault.New(fault.State,
			"volume %s is still mounted by the sandbox of the pod at %s%s; it is unpublished when that has ended, "+
				"or was told to let go of it (crustctl sandbox list, crustctl sandbox unpublish)", id, r.Target, mounter.HeldBy(a.Device).After("; "))
	}
	return nil
}

// heldStatic tells whether somebody uses the device that a static volume was staged with. The driver's own looks do not count.
func (d *Driver) heldStatic(static volume.StaticSource, id string) (bool, error) {
	if held, err := static.Held(id); err != nil || !held {
		return false, err
	}
	defer d.readers.exclude(id, "being looked at for who uses it")()
	return static.Held(id)
}

// deferredStats answers NodeGetVolumeStats for a deferred volume (C05, C07).
func deferredStats(r deferral, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := r.unusable(); err != nil {
		return nil, err
	}
	supported, err := crust.SupportsStats(req)
	if err != nil {
		return nil, invalid("%s", err)
	}
	if !supported {
		return nil, fault.New(fault.State,
			"volume %s is mounted by the pod's runtime, and only that knows how full it is; the caller does not ask it "+
				"(`crustctl sandbox stats` does)", r.VolumeID)
	}
	resp := &csi.NodeGetVolumeStatsResponse{}
	return resp, crust.SetStatsSource(resp, r.Source)
}

// deferredAt returns the deferral at a path: a target or the staging path. A deferred volume that
// is not at path is fault.NotFound.
func (d *Driver) deferredAt(id, path string) (r deferral, deferred bool, err error) {
	all := d.deferrals.of(id)
	if len(all) == 0 {
		return r, false, nil
	}
	if r, ok := d.deferrals.at(id, path); ok {
		return r, true, nil
	}
	if staged, _ := d.staged.get(id); path != staged.StagingPath {
		return r, false, fault.New(fault.NotFound, "volume %s is deferred to the runtime of the pod at %s, not at %s",
			id, targetsOf(all), path)
	}
	return all[0], true, nil
}

// deferredExpand grows the device of a deferred volume (C06, C07).
func (d *Driver) deferredExpand(ctx context.Context, r deferral, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if err := r.unusable(); err != nil {
		return nil, err
	}
	supported, err := crust.SupportsExpand(req)
	if err != nil {
		return nil, invalid("%s", err)
	}
	src, v, err := d.Volumes.Find(r.VolumeID)
	if err != nil {
		return nil, err
	}
	if v.Share {
		return &csi.NodeExpandVolumeResponse{}, nil // its server decides, as without a runtime
	}
	a, ok, err := src.Attached(r.VolumeID)
	if err != nil || !ok {
		return nil, errors.Join(fault.New(fault.State, "volume %s: its device is gone", r.VolumeID), err)
	}
	// The device grows even if the runtime cannot grow the file system: the next NodeStageVolume
	// does.
	if r.readOnly() {
		err = src.Refresh(ctx, r.VolumeID)
	} else {
		err = d.enlargeHere(ctx, src, r.VolumeID, req.GetCapacityRange())
	}
	if err != nil {
		return nil, err
	}
	size, err := mounter.DeviceSize(a.Device)
	if err != nil {
		return nil, err
	}
	if err := inRange(r.VolumeID, size, req.GetCapacityRange()); err != nil {
		return nil, err
	}
	resp := &csi.NodeExpandVolumeResponse{CapacityBytes: size}
	if supported && !r.readOnly() {
		return resp, crust.SetExpandSource(resp, r.Source)
	}
	// It may have grown at stage. Only the size is read beside the sandbox's writes.
	found, err := superblock.Identify(a.Device.Path, r.Type)
	if err != nil {
		return nil, volume.OfDevice(r.VolumeID, err)
	}
	if mounter.Unfilled(found, size) {
		why := "cannot grow its file system"
		if r.readOnly() {
			why = "only reads it"
		}
		return nil, fault.New(fault.State,
			"volume %s is mounted by the pod's runtime, which %s: end the pod, and the volume is grown when it is next staged",
			r.VolumeID, why)
	}
	return resp, nil
}
