package looppool

import (
	"context"
	"fmt"
	"strings"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// ForPod prepares the device whose node a pod receives: see rawdevice.
func (p *Pool) ForPod(_ context.Context, id string, d mounter.Device) (mounter.Device, error) {
	found, err := p.devices(id)
	if err != nil {
		return mounter.Device{}, err
	}
	key, _ := p.volumes.Key(id)
	for _, f := range found {
		if !device(f).Same(d) {
			continue
		}
		published, held, err := p.raw.Publish(f)
		if err != nil {
			return mounter.Device{}, fmt.Errorf("volume %s: %w", id, err)
		}
		if !held.ReadOnly {
			p.rememberDevice(key, held)
		}
		return published, nil
	}
	return mounter.Device{}, fault.New(fault.State,
		"volume %s: %s is not bound to its file any more; unstage and stage it again", id, d.Path)
}

// restoreDevice reverts what a pod changed on a device that it was given, and records it for Health.
func (p *Pool) restoreDevice(key string, d loopdev.Device) error {
	img := p.volumePath(key)
	changed, err := p.loop.Restore(d, img)
	if len(changed) == 0 {
		return err
	}
	what := fmt.Sprintf("%s was changed by a program that was given it (%s)", d.Path, strings.Join(changed, "; "))
	p.mu.Lock()
	known := p.changed[key] == what
	p.changed[key] = what
	p.mu.Unlock()
	id := p.name + "." + key
	if !known || err != nil {
		p.log.Warn("a raw block device was changed by a program that was given it; it is set back",
			"volume_id", id, "device", d.Path, "changed", changed, "error", err)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	return nil
}

// RestoreDevices reverts what pods changed on the volume's devices.
func (p *Pool) RestoreDevices(_ context.Context, id string) error {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return err
	}
	found, err := p.devices(id)
	if err != nil {
		return err
	}
	for _, d := range found {
		if err := p.restoreDevice(key, d); err != nil {
			return err
		}
	}
	return nil
}

// rawHealth reports problems of the devices that pods were given.
func (p *Pool) rawHealth(key string) []mounter.Ailment {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []mounter.Ailment
	if what, ok := p.changed[key]; ok {
		found = append(found, mounter.Ailment{Reason: "DeviceChanged",
			Message: what + "; it was set back. Look at the pods that have the volume"})
	}
	if p.attached[key].Held {
		found = append(found, rawdevice.HeldAilment)
	}
	return found
}

// ownsHeld finds the volume of a device that shows another file than when it was held.
func (p *Pool) ownsHeld(d mounter.Device) (string, bool, error) {
	held, ok, err := p.loop.HeldFile(d.Major, d.Minor)
	if err != nil || !ok {
		return "", false, err
	}
	for key, r := range p.volumes.All() {
		img, id := p.volumePath(key), r.Volume.ID
		if is, err := held.Is(img); err != nil || is {
			return id, is, err
		}
	}
	return "", false, nil
}
