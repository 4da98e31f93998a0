package static

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// claim is the device of a volume that is staged or being staged.
type claim struct {
	device   mounter.Device
	identity mounter.Identity
}

// Attach finds the device and claims it for the volume until Release or Detach: two volumes
// cannot have one device or overlapping parts of it. A device that somebody else on this node
// uses is refused.
func (s *Source) Attach(ctx context.Context, id string) (volume.Attachment, error) {
	e, err := s.find(id)
	if err != nil {
		return volume.Attachment{}, err
	}
	if e.Device == "" {
		return volume.Attachment{Share: &volume.Share{Type: fstype.NFS, Source: e.source()}}, nil
	}
	d, err := s.resolve(id, e.Device)
	if err != nil && !s.allowed(filepath.Clean(e.Device)) {
		if a, ok, aerr := s.Attached(id); ok && aerr == nil {
			return a, nil // a staged volume keeps its device
		}
	}
	if err != nil {
		return volume.Attachment{}, err
	}
	identity, err := mounter.Identify(d)
	if err != nil {
		return volume.Attachment{}, fmt.Errorf("volume %s: which disk %s is: %w", id, d.Path, err)
	}
	again, err := s.claim(id, claim{d, identity})
	if again && err == nil {
		err = s.RestoreDevices(ctx, id)
	}
	if err != nil || again {
		return volume.Attachment{Device: d}, err
	}
	if err = s.unused(e, d); err == nil {
		err = s.learn(e, d, identity)
	}
	if err != nil {
		s.Release(id)
		return volume.Attachment{}, err
	}
	return volume.Attachment{Device: d}, nil
}

// claim claims the device for the volume; again is true if the volume had it already.
func (s *Source) claim(id string, c claim) (again bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	had, again := s.attached[id]
	if again && !had.device.Same(c.device) {
		return false, fault.New(fault.State, "volume %s is staged as device %d:%d, and %s is now %d:%d; unstage and stage it again",
			id, had.device.Major, had.device.Minor, c.device.Path, c.device.Major, c.device.Minor)
	}
	if again && had.identity.Replaced(c.identity) {
		return false, replaced(id, had, c.identity)
	}
	for other, o := range s.attached {
		if other != id && (o.device.Same(c.device) || o.identity.Overlaps(c.identity)) {
			return false, fault.New(fault.State, "volume %s: device %s is staged as volume %s", id, c.device.Path, other)
		}
	}
	s.attached[id] = c
	return again, nil
}

// replaced returns the error for a replaced disk: the kernel may reuse the device number of a
// disk that is gone.
func replaced(id string, had claim, now mounter.Identity) error {
	return fault.New(fault.State, "volume %s is staged as the disk %s, and %s is the disk %s now; "+
		"unstage it, and stage it again where its own disk is", id, had.identity, had.device.Path, now)
}

// unused refuses a device that is mounted or held by somebody else. Two writers would ruin its
// content, and a file system would be shared with the host's own mount.
func (s *Source) unused(e entry, d mounter.Device) error {
	patience := time.Second // partition scanners hold a device briefly
	if e.Volume.Facts.Formatting != nil {
		patience = 10 * time.Second // a mkfs of an earlier driver process is being killed
	}
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		busy, err := mounter.Busy(d.Path)
		if err != nil || !busy {
			return err
		}
		if time.Since(begin) < patience && len(mounter.Holders(d)) == 0 {
			continue
		}
		by := strings.Join(mounter.UsedBy(d), "; ")
		if by == "" {
			by = "by whom could not be found out (see `lsblk` and `fuser -v " + d.Path + "`)"
		}
		return fault.New(fault.State, "volume %s: device %s is in use on this node: %s. "+
			"It was not touched: end that use, or give the volume another device", e.Volume.ID, d.Path, by)
	}
}

// Release releases a device that was claimed and is not staged.
func (s *Source) Release(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.attached, id)
	delete(s.changed, id)
}

// Attached returns the device, if it is still the one that was attached.
func (s *Source) Attached(id string) (volume.Attachment, bool, error) {
	e, err := s.find(id)
	if err != nil {
		return volume.Attachment{}, false, err
	}
	if e.Device == "" {
		return volume.Attachment{Share: &volume.Share{Type: fstype.NFS, Source: e.source()}}, true, nil
	}
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return volume.Attachment{}, false, nil
	}
	known := c.device
	now, err := mounter.FindDevice(known.Path)
	if linux.Short(err) {
		return volume.Attachment{}, false, fmt.Errorf("volume %s: %w", id, err)
	}
	if err != nil {
		return volume.Attachment{}, false, fault.New(fault.State, "volume %s: its device %s is gone: %w", id, known.Path, err)
	}
	if !now.Same(known) {
		return volume.Attachment{}, false, fault.New(fault.State,
			"volume %s: %s is now another device (%d:%d, was %d:%d); unstage and stage it again",
			id, known.Path, now.Major, now.Minor, known.Major, known.Minor)
	}
	identity, err := mounter.Identify(now)
	if err != nil {
		return volume.Attachment{}, false, fmt.Errorf("volume %s: which disk %s is: %w", id, now.Path, err)
	}
	if c.identity.Replaced(identity) {
		return volume.Attachment{}, false, replaced(id, c, identity)
	}
	return volume.Attachment{Device: now}, true, nil
}

// Remember registers a device that an earlier process attached, whether or not its path still
// leads to it.
func (s *Source) Remember(id string, d mounter.Device) {
	c := claim{device: d}
	// Identify the device only if the path leads to it. An unknown identity claims just the
	// device number.
	if now, err := mounter.FindDevice(d.Path); err == nil && now.Same(d) {
		if identity, err := mounter.Identify(d); err == nil {
			c.identity = identity
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.volumes[id].Identity; was.Replaced(c.identity) || !c.identity.Known() {
		c.identity = was // of the disk that was staged
	}
	s.attached[id] = c
}

// Recall returns the device that the volume had last, if its path leads to the same disk.
func (s *Source) Recall(id string) (mounter.Device, bool) {
	e, err := s.find(id)
	if err != nil || e.Device == "" {
		return mounter.Device{}, false
	}
	d, err := mounter.FindNamed(filepath.Clean(e.Device))
	if err != nil {
		return mounter.Device{}, false
	}
	now, err := mounter.Identify(d)
	return d, err == nil && !e.Identity.Replaced(now)
}

// Owns returns the volume to which the device belongs, or the device below a read-only loop
// device. A held one stays the volume's, whatever its pod made it show.
func (s *Source) Owns(d mounter.Device) (string, bool, error) {
	d, err := rawdevice.Below(d)
	if err != nil {
		return "", false, err
	}
	if id, ok := s.attachedAs(d.Same); ok {
		return id, true, nil
	}
	if id, ok, err := s.ownsHeld(d); err != nil || ok {
		return id, ok, err
	}
	major, minor, ok, err := s.loop.Below(d.Major, d.Minor)
	if err != nil || !ok {
		return "", false, err
	}
	id, ok := s.attachedAs(mounter.Device{Major: major, Minor: minor}.Same)
	return id, ok, nil
}

// ownsHeld finds the volume on whose device a loop device was when it was held.
func (s *Source) ownsHeld(d mounter.Device) (string, bool, error) {
	held, ok, err := s.loop.HeldFile(d.Major, d.Minor)
	if err != nil || !ok {
		return "", false, err
	}
	s.mu.Lock()
	attached := maps.Clone(s.attached)
	s.mu.Unlock()
	for id, c := range attached {
		if is, err := held.Is(c.device.Path); err != nil || is {
			return id, is, err
		}
	}
	return "", false, nil
}

func (s *Source) attachedAs(is func(mounter.Device) bool) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, c := range s.attached {
		if is(c.device) {
			return id, true
		}
	}
	return "", false
}

// Detach releases what Attach and AttachReadOnly made. The device itself stays. It must not be
// mounted anywhere.
func (s *Source) Detach(ctx context.Context, id string) error {
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	d := c.device
	if err := s.DetachReadOnly(ctx, id, nil); err != nil {
		return err
	}
	if now, err := mounter.Identify(d); err == nil && c.identity.Replaced(now) {
		s.log.Warn("the disk of a volume that is unstaged was replaced; nothing is done to the one that is there now",
			"volume_id", id, "device", d.Path, "was", c.identity, "is", now)
		s.Release(id)
		return nil
	}
	if err := s.release(d); err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	err := linux.Outlast(func() error {
		busy, err := s.Held(id)
		if err == nil && busy {
			err = linux.EBUSY
		}
		return err
	})
	if err != nil && !errors.Is(err, linux.EBUSY) {
		return err
	}
	if err != nil {
		return fault.New(fault.State, "volume %s: %s is in use%s", id, d.Path, mounter.HeldBy(d).After("; "))
	}
	s.Release(id)
	return nil
}

// Held reports whether somebody uses the device that the volume was attached with, wherever its path leads now. A number is not given to
// another disk before everybody has let go of the first.
func (s *Source) Held(id string) (bool, error) {
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return s.heldElsewhere(id)
	}
	if now, err := mounter.Identify(c.device); err == nil && c.identity.Replaced(now) {
		return false, nil
	}
	return c.device.Held(s.loop.Dir)
}

// heldElsewhere is Held for a volume whose device is no longer known. It looks for the volume's disk under all names.
func (s *Source) heldElsewhere(id string) (bool, error) {
	e, err := s.find(id)
	if err != nil || !e.Identity.Known() {
		return false, err
	}
	all, err := filepath.Glob("/sys/class/block/*/dev")
	if err != nil {
		return false, err
	}
	for _, file := range all {
		d := mounter.Device{Path: "/dev/" + filepath.Base(filepath.Dir(file))}
		number, err := linux.ReadSmall(file)
		if err == nil {
			_, err = fmt.Sscanf(number, "%d:%d", &d.Major, &d.Minor)
		}
		if err == nil && e.Identity.Kind == "file" { // whether it is a loop device of that file is asked through its node
			d.Path, err = s.loop.NodeOf(filepath.Base(d.Path), d.Major, d.Minor)
		}
		var now mounter.Identity
		if err == nil {
			now, err = mounter.Identify(d)
		}
		if linux.Short(err) {
			return false, fmt.Errorf("volume %s: who uses its disk: %w", id, err)
		}
		if err != nil || now != e.Identity {
			continue // another disk, or one that is just going
		}
		if held, err := d.Held(s.loop.Dir); err != nil || held {
			return held, err
		}
	}
	return false, nil
}
