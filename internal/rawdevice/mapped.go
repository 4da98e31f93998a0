package rawdevice

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/devmapper"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// uuidPrefix begins the uuid of a mapped device; the number of the device below follows, "7:3".
const uuidPrefix = "CRUST-RAW-"

var errInUse = errors.New("somebody has it open exclusively")

func nameOf(d loopdev.Device) string { return fmt.Sprintf("crust-%s", filepath.Base(d.Path)) }

func uuidOf(d loopdev.Device) string { return fmt.Sprintf("%s%d:%d", uuidPrefix, d.Major, d.Minor) }

// segments returns two segments: the kernel passes an ioctl on to the device below a single
// segment, and answers ENOTTY for several.
func segments(d loopdev.Device, size int64) []devmapper.Segment {
	first := int64(1 << 20)
	if size <= first {
		first = size / 2 &^ 4095
	}
	return []devmapper.Segment{
		{Major: d.Major, Minor: d.Minor, Length: first},
		{Major: d.Major, Minor: d.Minor, Start: first, Length: size - first},
	}
}

func loopNode(d loopdev.Device) mounter.Device {
	return mounter.Device{Path: d.Path, Major: d.Major, Minor: d.Minor, ReadOnly: d.ReadOnly}
}

func (g Guard) mapped(d loopdev.Device) (mounter.Device, error) {
	c, err := devmapper.Open(g.Loops.Dir)
	if err != nil {
		return mounter.Device{}, err
	}
	defer c.Close()
	m, ok, err := c.Find(nameOf(d))
	if err != nil {
		return mounter.Device{}, err
	}
	if ok && m.UUID != uuidOf(d) {
		return mounter.Device{}, fault.New(fault.State,
			"the device-mapper device %s is not the driver's; remove or rename it (dmsetup)", m.Name)
	}
	size, err := mounter.DeviceSize(loopNode(d))
	if err != nil {
		return mounter.Device{}, err
	}
	if ok {
		if m.Size() != size { // a process died before the device was complete
			err = c.Load(m.Name, d.ReadOnly, segments(d, size))
		}
	} else {
		m, err = c.Create(nameOf(d), uuidOf(d), d.ReadOnly, segments(d, size))
	}
	if errors.Is(err, linux.EBUSY) {
		return mounter.Device{}, fmt.Errorf("%s: %w", d.Path, errInUse)
	}
	if err != nil {
		return mounter.Device{}, fmt.Errorf("%s: %w", d.Path, err)
	}
	path, err := g.Loops.NodeOf(fmt.Sprintf("dm-%d", m.Minor), m.Major, m.Minor)
	return mounter.Device{Path: path, Major: m.Major, Minor: m.Minor, ReadOnly: d.ReadOnly}, err
}

// Resize makes a mapped device as large as the one below.
func (g Guard) Resize(d loopdev.Device) error {
	c, err := devmapper.Open(g.Loops.Dir)
	if errors.Is(err, devmapper.ErrAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.Close()
	m, ok, err := c.Find(nameOf(d))
	if err != nil || !ok || m.UUID != uuidOf(d) {
		return err
	}
	size, err := mounter.DeviceSize(loopNode(d))
	if err != nil || size == m.Size() {
		return err
	}
	return c.Load(m.Name, d.ReadOnly, segments(d, size))
}

func (g Guard) unmap(d loopdev.Device) error {
	c, err := devmapper.Open(g.Loops.Dir)
	if errors.Is(err, devmapper.ErrAbsent) {
		return nil
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil // nothing could be mapped either
	}
	if err != nil {
		return err
	}
	defer c.Close()
	m, ok, err := c.Find(nameOf(d))
	if err == nil && ok && m.UUID == uuidOf(d) {
		err = g.writeBack(d, m)
	}
	if err != nil {
		return err
	}
	const patience = 500 * time.Millisecond // udev examines a device that changed
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		m, ok, err := c.Find(nameOf(d))
		if err != nil || !ok || m.UUID != uuidOf(d) {
			return err
		}
		err = c.Remove(m.Name)
		if err == nil {
			continue
		}
		if !errors.Is(err, linux.EBUSY) {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		if time.Since(begin) > patience {
			return fault.New(fault.State, "/dev/mapper/%s over %s is still open, in some process (see `fuser -v /dev/mapper/%s`) or under "+
				"another loop device "+
				"(see `losetup -l`; the kubelet locks raw block volumes so); it is released when that ends", m.Name, d.Path, m.Name)
		}
	}
}

// writeBack flushes the page cache of a mapped device. That cache is separate: the loop device
// below does not see a failed write of its pages, and the error is lost with the mapped device.
func (g Guard) writeBack(d loopdev.Device, m devmapper.Device) error {
	path, err := g.Loops.NodeOf(fmt.Sprintf("dm-%d", m.Minor), m.Major, m.Minor)
	if err != nil {
		return err
	}
	f, err := linux.Open(path, os.O_RDONLY)
	if linux.Short(err) {
		return fmt.Errorf("/dev/mapper/%s: %w", m.Name, err)
	}
	if err != nil {
		return nil // a device that cannot be opened has no pages; its removal reports the reason
	}
	defer f.Close()
	if err := linux.WriteBack(f); err != nil && !d.ReadOnly {
		return fault.New(fault.State, "/dev/mapper/%s: %w: %w; call again to release the device", m.Name, loopdev.ErrWritesLost, err)
	}
	return nil
}

// AllBelow is Below for each of several devices.
func AllBelow(devices []mounter.Device) ([]mounter.Device, error) {
	below := make([]mounter.Device, len(devices))
	for i, d := range devices {
		var err error
		if below[i], err = Below(d); err != nil {
			return nil, err
		}
	}
	return below, nil
}

// Below returns the device below a mapped device, and any other device unchanged.
func Below(d mounter.Device) (mounter.Device, error) {
	uuid, err := devmapper.UUID(d.Major, d.Minor)
	rest, ok := strings.CutPrefix(uuid, uuidPrefix)
	if err != nil || !ok {
		return d, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(rest, "%d:%d", &major, &minor); err != nil {
		return d, nil // only the driver creates such identities
	}
	return mounter.Device{Major: major, Minor: minor}, nil
}
