package static

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// AttachReadOnly returns a read-only loop device on top of the device, which must be attached. A device that is itself read-only is used as
// it is, unless it is a loop device: a pod could change its file (LOOP_CHANGE_FD), nobody would know any more which that was, and the next
// tenant would see the other one.
func (s *Source) AttachReadOnly(_ context.Context, id string) (mounter.Device, error) {
	a, ok, err := s.Attached(id)
	if err == nil && !ok {
		err = fault.New(fault.State, "volume %s is not attached", id)
	}
	if err == nil && a.Device.ReadOnly {
		var loop bool
		if loop, err = s.onLoop(a.Device); !loop {
			return a.Device, err
		}
	}
	if err != nil {
		return a.Device, err
	}
	d, err := s.loop.Attach(a.Device.Path, true)
	return mounter.Device{Path: d.Path, Major: d.Major, Minor: d.Minor, ReadOnly: d.ReadOnly}, err
}

// onLoop reports whether a device has the ioctls of a loop device: it is one, or a partition of one.
func (s *Source) onLoop(d mounter.Device) (bool, error) {
	if _, ok, err := s.loop.Open(d.Major, d.Minor); err != nil || ok {
		return ok, err
	}
	return loopdev.IsPartition(d.Major, d.Minor)
}

func (s *Source) readOnlyLoops(id string) ([]loopdev.Device, error) {
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nil, nil
	}
	return s.loop.On(c.device.Path, c.device.Major, c.device.Minor)
}

// DetachReadOnly releases the devices of AttachReadOnly, except those in use.
func (s *Source) DetachReadOnly(_ context.Context, id string, inUse []mounter.Device) error {
	inUse, err := rawdevice.AllBelow(inUse)
	if err != nil {
		return err
	}
	found, err := s.readOnlyLoops(id)
	if err != nil {
		return err
	}
	for _, d := range found {
		if slices.ContainsFunc(inUse, (mounter.Device{Major: d.Major, Minor: d.Minor}).Same) {
			continue
		}
		if err := s.raw.Detach(d); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
	}
	return nil
}

// ForPod prepares the device whose node a pod receives. It returns a device that is not a loop device unchanged, and refuses a partition of
// one: its node has the ioctls of the whole, with which a pod would unbind it, or reach the other partitions.
func (s *Source) ForPod(_ context.Context, id string, d mounter.Device) (mounter.Device, error) {
	loop, ok, err := s.loop.Open(d.Major, d.Minor)
	part := false
	if err == nil && !ok {
		part, err = loopdev.IsPartition(d.Major, d.Minor)
	}
	if part {
		return d, fault.New(fault.State, "volume %s: %s is a partition of a loop device, and a pod that had its node could unbind the whole "+
			"device, and reach its other partitions. For a raw block volume, make a loop device of that part alone "+
			"(`losetup --offset START --sizelimit LENGTH`), and name it in the volume", id, d.Path)
	}
	if err != nil || !ok {
		return d, err
	}
	published, _, err := s.raw.Publish(loop)
	if err != nil {
		return mounter.Device{}, fmt.Errorf("volume %s: %w", id, err)
	}
	published.ReadOnly = d.ReadOnly
	return published, nil
}

// release undoes ForPod for the volume's own device.
func (s *Source) release(d mounter.Device) error {
	loop, ok, err := s.loop.Open(d.Major, d.Minor)
	if err != nil || !ok {
		return err
	}
	return s.raw.Release(loop)
}

// RestoreDevices reverts what pods changed on the volume's devices.
func (s *Source) RestoreDevices(_ context.Context, id string) error {
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	d := c.device
	devices, err := s.readOnlyLoops(id)
	if err != nil {
		return err
	}
	paths := make([]string, len(devices), len(devices)+1)
	for i := range paths {
		paths[i] = d.Path
	}
	own, ok, err := s.loop.Open(d.Major, d.Minor)
	if err != nil {
		return err
	}
	if ok {
		shown, err := loopdev.BackingFile(d.Major, d.Minor)
		if err != nil {
			return err
		}
		devices, paths = append(devices, own), append(paths, shown)
	}
	for i, device := range devices {
		changed, err := s.loop.Restore(device, paths[i])
		if len(changed) > 0 {
			s.mu.Lock()
			s.changed[id] = fmt.Sprintf("%s was changed by a program that was given it (%s)", device.Path, strings.Join(changed, "; "))
			s.mu.Unlock()
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
	}
	return nil
}

// Health reports problems of the devices that pods were given. For other devices, see
// mounter.DeviceHealth.
func (s *Source) Health(id string) []mounter.Ailment {
	s.mu.Lock()
	c, attached := s.attached[id]
	what, changed := s.changed[id]
	s.mu.Unlock()
	var found []mounter.Ailment
	if changed {
		found = append(found, mounter.Ailment{Reason: "DeviceChanged",
			Message: what + "; it was set back. Look at the pods that have the volume"})
	}
	if attached {
		if loop, ok, err := s.loop.Open(c.device.Major, c.device.Minor); err == nil && ok && loop.Held {
			found = append(found, rawdevice.HeldAilment)
		}
	}
	return found
}
