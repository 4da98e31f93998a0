package dirpool

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// devices returns the key and the loop devices of a volume, even while it is being made or deleted.
func (p *Pool) devices(id string) (key string, found []loopdev.Device, err error) {
	if key, _, err = p.volumes.Find(id); err != nil && key == "" {
		return "", nil, err
	}
	found, err = p.loops.Find(p.volumeDisk(key))
	return key, found, err
}

func node(d loopdev.Device) mounter.Device {
	return mounter.Device{Path: d.Path, Major: d.Major, Minor: d.Minor, ReadOnly: d.ReadOnly}
}

// Attach makes a loop device of the volume's disk.
func (p *Pool) Attach(ctx context.Context, id string) (volume.Attachment, error) {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return volume.Attachment{}, err
	}
	d, err := p.loops.Attach(p.volumeDisk(key), false)
	if err != nil {
		return volume.Attachment{}, err
	}
	return volume.Attachment{Device: node(d)}, p.Refresh(ctx, id)
}

// Attached queries the kernel.
func (p *Pool) Attached(id string) (volume.Attachment, bool, error) {
	_, found, err := p.devices(id)
	if fault.Is(err, fault.NotFound) {
		return volume.Attachment{}, false, nil
	}
	d, ok := loopdev.Writable(found)
	return volume.Attachment{Device: node(d)}, ok, err
}

// Owns searches the devices of all volumes.
func (p *Pool) Owns(d mounter.Device) (string, bool, error) {
	for key := range p.volumes.All() {
		id := p.name + "." + key
		_, found, err := p.devices(id)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return "", false, err
		}
		if slices.ContainsFunc(found, func(f loopdev.Device) bool { return node(f).Same(d) }) {
			return id, true, nil
		}
	}
	return "", false, nil
}

// AttachReadOnly makes another loop device.
func (p *Pool) AttachReadOnly(_ context.Context, id string) (mounter.Device, error) {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return mounter.Device{}, err
	}
	if _, ok, err := p.Attached(id); err != nil {
		return mounter.Device{}, err
	} else if !ok {
		return mounter.Device{}, fault.New(fault.State, "volume %s is not attached", id)
	}
	d, err := p.loops.Attach(p.volumeDisk(key), true)
	return node(d), err
}

// DetachReadOnly releases the read-only devices that are not in use.
func (p *Pool) DetachReadOnly(_ context.Context, id string, inUse []mounter.Device) error {
	return p.release(id, func(d loopdev.Device) bool { return d.ReadOnly && !slices.ContainsFunc(inUse, node(d).Same) })
}

// Detach releases all devices.
func (p *Pool) Detach(_ context.Context, id string) error {
	err := p.release(id, func(loopdev.Device) bool { return true })
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

func (p *Pool) release(id string, which func(loopdev.Device) bool) error {
	_, found, err := p.devices(id)
	if err != nil {
		return err
	}
	for _, d := range found {
		if !which(d) {
			continue
		}
		if err := p.raw.Detach(d); err != nil {
			return fault.New(fault.KindOf(err), "volume %s: %w%s", id, err, mounter.HeldBy(node(d)).After("; "))
		}
	}
	return nil
}

// ForPod returns the device whose node a pod may have.
func (p *Pool) ForPod(_ context.Context, id string, d mounter.Device) (mounter.Device, error) {
	_, found, err := p.devices(id)
	if err != nil {
		return mounter.Device{}, err
	}
	for _, f := range found {
		if node(f).Same(d) {
			published, _, err := p.raw.Publish(f)
			return published, err
		}
	}
	return mounter.Device{}, fault.New(fault.State, "volume %s: %s is not its device", id, d.Path)
}

// RestoreDevices restores the device settings that pods changed.
func (p *Pool) RestoreDevices(_ context.Context, id string) error {
	key, found, err := p.devices(id)
	for _, d := range found {
		_, merr := p.loops.Restore(d, p.volumeDisk(key))
		err = errors.Join(err, merr)
	}
	return err
}

// Refresh makes the devices as large as the disk.
func (p *Pool) Refresh(_ context.Context, id string) error {
	_, found, err := p.devices(id)
	for _, d := range found {
		err = errors.Join(err, d.SetCapacity(), p.raw.Resize(d))
	}
	return err
}

// Health reports a missing disk.
func (p *Pool) Health(id string) []mounter.Ailment {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return nil
	}
	if _, err := os.Lstat(p.volumeDisk(key)); err != nil {
		return []mounter.Ailment{{Reason: "ImageGone", Message: err.Error(), Fatal: true}}
	}
	return nil
}
