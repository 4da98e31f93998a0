// Package devmapper makes device-mapper devices of linear segments, with the ioctls of
// /dev/mapper/control (linux/dm-ioctl.h). No other package makes them.
package devmapper

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls: _IOWR(0xfd, number, struct dm_ioctl).
const (
	version     = 0xc138fd00
	devCreate   = 0xc138fd03
	devRemove   = 0xc138fd04
	devSuspend  = 0xc138fd06
	devStatus   = 0xc138fd07
	tableLoad   = 0xc138fd09
	headerSize  = 312
	specSize    = 40
	readOnly    = 1 << 0 // DM_READONLY_FLAG
	suspendFlag = 1 << 1 // DM_SUSPEND_FLAG
	controlNode = "/dev/mapper/control"
	sector      = 512
)

// header is struct dm_ioctl.
type header struct {
	Version                      [3]uint32
	DataSize, DataStart, Targets uint32
	OpenCount                    int32
	Flags, Event, _              uint32
	Dev                          uint64
	Name                         [128]byte
	UUID                         [129]byte
	_                            [7]byte
}

// Control is an open /dev/mapper/control.
type Control struct{ f *os.File }

// Segment is a part of an underlying device that the new device maps, in bytes.
type Segment struct {
	Major, Minor  uint32
	Start, Length int64
}

// Device is a device-mapper device.
type Device struct {
	Name, UUID   string
	Major, Minor uint32
	Open         int // number of openers
}

// Open opens the control device. If /dev lacks it, Open makes a node in dir, which may cause the
// kernel to load its module. It returns ErrAbsent if the kernel has no device-mapper.
func Open(dir string) (*Control, error) {
	f, err := os.OpenFile(controlNode, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) && dir != "" {
		const misc, mapper = 10, 236 // MISC_MAJOR, MAPPER_CTRL_MINOR
		node := filepath.Join(dir, "mapper-control")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(misc, mapper))); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("%s: %w", node, err)
		}
		f, err = os.OpenFile(node, os.O_RDWR, 0)
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return nil, fmt.Errorf("%w: %w", ErrAbsent, err)
	}
	if err != nil {
		return nil, err
	}
	c := &Control{f}
	if _, err := c.call("DM_VERSION", version, header{}, nil); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return c, nil
}

// ErrAbsent means that the kernel has no device-mapper.
var ErrAbsent = errors.New("this kernel has no device-mapper")

// Close releases the descriptor.
func (c *Control) Close() error { return c.f.Close() }

func (c *Control) call(name string, request uintptr, h header, data []byte) (header, error) {
	h.Version = [3]uint32{4, 0, 0}
	h.DataStart = headerSize
	buf := make([]byte, max(headerSize+len(data), 4096))
	h.DataSize = uint32(len(buf))
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, h); err != nil {
		return h, err
	}
	copy(buf, b.Bytes())
	copy(buf[headerSize:], data)
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, c.f.Fd(), request, uintptr(unsafe.Pointer(&buf[0])))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return h, os.NewSyscallError(name, errno)
		}
		return h, binary.Read(bytes.NewReader(buf), binary.NativeEndian, &h)
	}
}

// Size is the device's length in bytes; 0 if it has no segments, or is gone.
func (d Device) Size() int64 {
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/size", d.Major, d.Minor))
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n * sector
}

func named(name string) header {
	var h header
	copy(h.Name[:len(h.Name)-1], name)
	return h
}

func device(h header) Device {
	return Device{
		Name: unix.ByteSliceToString(h.Name[:]), UUID: unix.ByteSliceToString(h.UUID[:]),
		Major: unix.Major(h.Dev), Minor: unix.Minor(h.Dev), Open: int(h.OpenCount),
	}
}

// Find returns the device with that name; ok is false if there is none.
func (c *Control) Find(name string) (d Device, ok bool, err error) {
	h, err := c.call("DM_DEV_STATUS", devStatus, named(name), nil)
	if errors.Is(err, unix.ENXIO) {
		return Device{}, false, nil
	}
	return device(h), err == nil, err
}

// Create makes a device of the segments, in order. EEXIST or EBUSY if the name or uuid is in use;
// EBUSY, too, if an underlying device is open exclusively elsewhere.
func (c *Control) Create(name, uuid string, ro bool, segments []Segment) (Device, error) {
	h := named(name)
	copy(h.UUID[:len(h.UUID)-1], uuid)
	if ro {
		h.Flags = readOnly
	}
	made, err := c.call("DM_DEV_CREATE", devCreate, h, nil)
	if err != nil {
		return Device{}, err
	}
	if err := c.Load(name, ro, segments); err != nil {
		return Device{}, errors.Join(err, c.Remove(name))
	}
	return device(made), nil
}

// Load replaces the segments of a device in one step: writes wait.
func (c *Control) Load(name string, ro bool, segments []Segment) error {
	var data []byte
	var start int64
	for _, s := range segments {
		params := fmt.Sprintf("%d:%d %d", s.Major, s.Minor, s.Start/sector)
		size := (specSize + len(params) + 1 + 7) &^ 7
		spec := make([]byte, size)
		binary.NativeEndian.PutUint64(spec, uint64(start/sector))
		binary.NativeEndian.PutUint64(spec[8:], uint64(s.Length/sector))
		binary.NativeEndian.PutUint32(spec[20:], uint32(size))
		copy(spec[24:], "linear")
		copy(spec[specSize:], params)
		data = append(data, spec...)
		start += s.Length
	}
	h := named(name)
	h.Targets = uint32(len(segments))
	if ro {
		h.Flags = readOnly
	}
	if _, err := c.call("DM_TABLE_LOAD", tableLoad, h, data); err != nil {
		return err
	}
	return c.Resume(name)
}

// Suspend flushes the device and blocks writes until Resume.
func (c *Control) Suspend(name string) error {
	h := named(name)
	h.Flags = suspendFlag
	_, err := c.call("DM_DEV_SUSPEND", devSuspend, h, nil)
	return err
}

// Resume ends Suspend, and activates the loaded table.
func (c *Control) Resume(name string) error {
	_, err := c.call("DM_DEV_SUSPEND", devSuspend, named(name), nil)
	return err
}

// Remove removes the device; a missing one is no error. EBUSY while it is open.
func (c *Control) Remove(name string) error {
	_, err := c.call("DM_DEV_REMOVE", devRemove, named(name), nil)
	if errors.Is(err, unix.ENXIO) {
		return nil
	}
	return err
}

// UUID returns the uuid of the device-mapper device with that number, "" if it is none.
func UUID(major, minor uint32) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/dm/uuid", major, minor))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}
