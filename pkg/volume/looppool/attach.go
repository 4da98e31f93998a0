package looppool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

func device(d loopdev.Device) mounter.Device {
	return mounter.Device{Path: d.Path, Major: d.Major, Minor: d.Minor, ReadOnly: d.ReadOnly}
}

// image returns the volume's file, which must exist.
func (p *Pool) image(id string) (key, img string, v volume.Volume, err error) {
	key, r, err := p.volumes.Find(id)
	if err != nil {
		return "", "", volume.Volume{}, err
	}
	if img = p.volumePath(key); !exists(img) {
		return "", "", volume.Volume{}, gone(id, img)
	}
	return key, img, r.Volume, nil
}

// Attach binds the volume's file to a loop device.
func (p *Pool) Attach(_ context.Context, id string) (volume.Attachment, error) {
	key, r, err := p.volumes.Find(id)
	if err == nil {
		r, err = p.follow(key, r)
	}
	if err != nil {
		return volume.Attachment{}, err
	}
	img := p.volumePath(key)
	v := r.Volume
	if v.Thick {
		if err := p.refill(img, v); err != nil {
			return volume.Attachment{}, err
		}
	}
	d, err := p.loop.Attach(img, false)
	if err != nil {
		return volume.Attachment{}, fmt.Errorf("volume %s: %w", id, err)
	}
	if v.Thick {
		// A discard would return the reserved space to the pool.
		if err := d.DisableDiscard(); err != nil {
			return volume.Attachment{}, fmt.Errorf("volume %s: discard could not be switched off: %w", id, err)
		}
	}
	p.rememberDevice(key, d)
	if err := p.restoreDevice(key, d); err != nil {
		return volume.Attachment{}, err
	}
	return volume.Attachment{Device: device(d)}, refresh(v, d)
}

// Attached returns the device bound to the volume's file.
func (p *Pool) Attached(id string) (volume.Attachment, bool, error) {
	key, ok := p.volumes.Key(id)
	if !ok {
		return volume.Attachment{}, false, nil
	}
	p.mu.Lock()
	d, ok := p.attached[key]
	p.mu.Unlock()
	if ok {
		now, ok, err := p.loop.Now(d)
		if err != nil {
			return volume.Attachment{}, false, err
		}
		if ok {
			return volume.Attachment{Device: device(d)}, true, p.restoreDevice(key, now)
		}
	}
	// Not known to this process, or changed by somebody else.
	found, err := p.devices(id)
	if err != nil {
		return volume.Attachment{}, false, err
	}
	if d, ok := loopdev.Writable(found); ok {
		p.rememberDevice(key, d)
		return volume.Attachment{Device: device(d)}, true, p.restoreDevice(key, d)
	}
	p.forgetDevice(key)
	return volume.Attachment{}, false, nil
}

// devices returns the loop devices bound to the volume's file. It also finds those of a file
// that somebody removed, so that such a volume can be detached.
func (p *Pool) devices(id string) ([]loopdev.Device, error) {
	key, _, err := p.volumes.Find(id)
	if err != nil && !errors.Is(err, record.ErrUnusable) {
		return nil, err
	}
	img := p.volumePath(key)
	return p.loop.Find(img)
}

func (p *Pool) rememberDevice(key string, d loopdev.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attached[key] = d
	p.owner[numbers{d.Major, d.Minor}] = key
}

func (p *Pool) forgetDevice(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d, ok := p.attached[key]; ok {
		delete(p.owner, numbers{d.Major, d.Minor})
		delete(p.attached, key)
		delete(p.changed, key)
	}
}

// AttachReadOnly binds the file to another, read-only loop device.
func (p *Pool) AttachReadOnly(_ context.Context, id string) (mounter.Device, error) {
	key, img, _, err := p.image(id)
	if err != nil {
		return mounter.Device{}, err
	}
	if _, ok, err := p.Attached(id); err != nil {
		return mounter.Device{}, err
	} else if !ok {
		return mounter.Device{}, fault.New(fault.State, "volume %s is not attached", id)
	}
	p.mu.Lock()
	p.readers[key] = true
	p.mu.Unlock()
	d, err := p.loop.Attach(img, true)
	return device(d), err
}

// DetachReadOnly releases the devices of AttachReadOnly, except those in use.
func (p *Pool) DetachReadOnly(_ context.Context, id string, inUse []mounter.Device) error {
	inUse, err := rawdevice.AllBelow(inUse)
	if err != nil {
		return err
	}
	return p.detach(id, func(d loopdev.Device) bool {
		return d.ReadOnly && !slices.ContainsFunc(inUse, device(d).Same)
	})
}

// Detach releases all devices of the volume.
func (p *Pool) Detach(_ context.Context, id string) error {
	if err := p.settle(id, ""); err != nil {
		return err // a frozen file system holds its device, though nothing shows it
	}
	key, ok := p.volumes.Key(id)
	if !ok {
		return p.detach(id, every)
	}
	p.mu.Lock()
	d, known := p.attached[key]
	p.mu.Unlock()
	if only, err := p.detachKnown(key, d, known); err != nil {
		return detachError(id, d, err)
	} else if !only {
		if err := p.detach(id, every); err != nil {
			return err
		}
		p.mu.Lock()
		delete(p.readers, key)
		p.mu.Unlock()
	}
	if known {
		// An earlier call may have started the release without waiting for its end.
		if err := d.Forget(); err != nil {
			p.log.Warn("the discard limit of a loop device was not set back", "volume_id", id, "device", d.Path, "error", err)
		}
	}
	p.forgetDevice(key)
	return nil
}

func every(loopdev.Device) bool { return true }

// detachKnown detaches the device that this process knows, if any. It reports whether the volume certainly has no other. The search for
// others looks at each loop device of the node, and there may be thousands.
func (p *Pool) detachKnown(key string, d loopdev.Device, known bool) (only bool, err error) {
	if known {
		now, ok, err := p.loop.Now(d)
		if err != nil || ok && now.Held {
			return false, nil // the search tells
		}
		if ok {
			if err := p.raw.Detach(now); err != nil {
				return false, err
			}
			// If somebody else closed it last, mostly udev, the kernel lets go of the file a moment later.
			for begin := time.Now(); p.tells(key) && !p.bare(key) && time.Since(begin) < letGo; {
				time.Sleep(letGo / 20)
			}
		}
	}
	return p.bare(key), nil
}

// letGo is how long a search for a volume's devices waits for the kernel.
const letGo = 100 * time.Millisecond

// bare reports whether the volume certainly has no device. Its file tells, but for a read-only device that a pod made show another file. So
// the file is believed only if the volume has had no read-only device: rememberAll finds earlier ones, AttachReadOnly notes new ones.
func (p *Pool) bare(key string) bool { return p.tells(key) && loopdev.Unbound(p.volumePath(key)) }

// tells reports whether a volume's file tells of all its devices.
func (p *Pool) tells(key string) bool {
	_, usable := p.volumes.Look(key) // rememberAll does not look for the others'
	p.mu.Lock()
	defer p.mu.Unlock()
	return usable && p.readersKnown && !p.readers[key]
}

func (p *Pool) detach(id string, which func(loopdev.Device) bool) error {
	found, err := p.devices(id)
	if err != nil {
		return err
	}
	for _, d := range found {
		if !which(d) {
			continue
		}
		if err := p.raw.Detach(d); err != nil {
			return detachError(id, d, err)
		}
	}
	return nil
}

// detachError adds the volume and, if its device is in use, where it is mounted. It keeps the
// kind of err, because a failed release does not always mean that the device is in use.
func detachError(id string, d loopdev.Device, err error) error {
	return fault.New(fault.KindOf(err), "volume %s: %w%s", id, err, mounter.HeldBy(device(d)).After("; "))
}

// Owns returns the volume whose file the loop device is bound to. A device in use cannot be
// bound to another file meanwhile, so for a device that this process bound, the record in
// memory is sufficient.
func (p *Pool) Owns(d mounter.Device) (string, bool, error) {
	d, err := rawdevice.Below(d)
	if err != nil {
		return "", false, err
	}
	p.mu.Lock()
	key, ok := p.owner[numbers{d.Major, d.Minor}]
	p.mu.Unlock()
	shown, err := loopdev.BackingFile(d.Major, d.Minor)
	if err != nil {
		return "", false, err
	}
	name, isImage := strings.CutSuffix(filepath.Base(shown), imageExtension)
	if ok && name == key {
		return p.name + "." + key, true, nil
	}
	key, ok = name, isImage
	if !ok {
		return p.ownsHeld(d)
	}
	if !p.volumes.Has(key) {
		return p.ownsHeld(d)
	}
	// Compare the file itself: another pool may have a file of the same name.
	img := p.volumePath(key)
	found, err := p.loop.Find(img)
	if err != nil {
		return "", false, err
	}
	for _, f := range found {
		if device(f).Same(d) {
			return p.name + "." + key, true, nil
		}
	}
	return p.ownsHeld(d)
}

// rememberAll finds the devices of all volumes in one pass.
func (p *Pool) rememberAll() error {
	keys := map[string]string{} // by volume file
	p.volumes.Each(func(key string, _ journal.VolumeRecord) { keys[p.volumePath(key)] = key })
	found, err := p.loop.Over(slices.Collect(maps.Keys(keys)))
	for img, devices := range found {
		if d, ok := loopdev.Writable(devices); ok {
			p.rememberDevice(keys[img], d)
		}
		if slices.ContainsFunc(devices, func(d loopdev.Device) bool { return d.ReadOnly }) {
			p.mu.Lock()
			p.readers[keys[img]] = true
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readersKnown = err == nil
	return err
}

// Refresh grows the loop devices to the size of the file.
func (p *Pool) Refresh(_ context.Context, id string) error {
	_, img, v, err := p.image(id)
	if err != nil {
		return err
	}
	found, err := p.loop.Find(img)
	if err != nil {
		return err
	}
	if err := refresh(v, found...); err != nil {
		return err
	}
	for _, d := range found {
		if err := p.raw.Resize(d); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
	}
	return nil
}

func refresh(v volume.Volume, devices ...loopdev.Device) error {
	for _, d := range devices {
		size, err := mounter.DeviceSize(device(d))
		if err == nil && size < v.Size {
			err = d.SetCapacity()
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.ID, err)
		}
	}
	return nil
}
