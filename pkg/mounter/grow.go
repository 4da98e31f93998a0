package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// ErrGrowOffline is in the chain of the error of Grow when the kernel refuses
// to grow a mounted file system because this process lacks CAP_SYS_RESOURCE.
var ErrGrowOffline = errors.New("to grow it while it is mounted needs CAP_SYS_RESOURCE")

// Grow makes a mounted file system as large as its device; dir is open on any
// directory of it. One that fills its device already is left alone.
func Grow(dir *os.File, name string, d Device) error {
	size, err := DeviceSize(d)
	if err != nil {
		return err
	}
	grow := fstype.Of(name).Grow
	if grow == nil {
		return fault.New(fault.State, "a file system of type %s cannot be grown while mounted", name)
	}
	err = grow(dir, size, func() (int64, int64, error) {
		// Reading the device shows what the kernel has in its buffers: they are
		// the same pages.
		sb, err := probe(d.Path, size)
		if err == nil && sb.BlockSize == 0 {
			err = fault.New(fault.State, "the superblock is not that of %s any more: %s", name, sb)
		}
		return sb.Size, sb.BlockSize, err
	})
	if errors.Is(err, linux.EPERM) && GrowsOffline(name) {
		return fault.New(fault.State, "%s on %s: %w; it is grown when it is next staged, so stop its pods. A privileged container has the "+
			"capability where its node's root has it", name, d.Path, ErrGrowOffline)
	}
	if err != nil {
		return fmt.Errorf("grow %s on %s to %d bytes: %w", name, d.Path, size, err)
	}
	return nil
}

// GrowsOffline tells whether this process surely may not grow a mounted file
// system of that type, which a program can grow while it is not mounted.
func GrowsOffline(name string) bool {
	if !fstype.Of(name).GrowthIsPrivileged {
		return false
	}
	ok, err := linux.HasCapability(linux.CapSysResource)
	return err == nil && !ok
}

// Unfilled tells whether a file system that is not mounted could be grown: its
// device has at least 16 MiB more. A smaller rest may be no use to it (ext4
// makes no last group of a few blocks), and would be tried for ever.
func Unfilled(r superblock.Result, deviceSize int64) bool {
	const worthwhile = 16 << 20
	return r.BlockSize > 0 && deviceSize-r.Size >= worthwhile
}

// DeviceSize is the device's length in bytes, now.
func DeviceSize(d Device) (int64, error) {
	f, err := linux.Open(d.Path, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return linux.BlockSize64(f)
}

func probe(device string, size int64) (superblock.Result, error) {
	f, err := linux.Open(device, os.O_RDONLY)
	if err != nil {
		return superblock.Result{}, err
	}
	defer f.Close()
	return superblock.Probe(f, size)
}

// FindDevice looks at a block device node; symbolic links are followed.
func FindDevice(path string) (Device, error) {
	f, err := linux.Open(path, os.O_RDONLY)
	if err != nil {
		return Device{}, err
	}
	defer f.Close()
	st, err := linux.StatxFile(f)
	if err != nil {
		return Device{}, err
	}
	if !st.IsBlock() {
		return Device{}, fault.New(fault.State, "%s is no block device", path)
	}
	ro, err := linux.BlockReadOnly(f)
	if err != nil {
		return Device{}, err
	}
	return Device{Path: path, Major: st.RdevMajor, Minor: st.RdevMinor, ReadOnly: ro}, nil
}

// Held tells whether the device is in use: mounted in any namespace, or opened
// exclusively. It asks by the device's number; where the path leads elsewhere
// meanwhile, by a node made in dir for the moment.
func (d Device) Held(dir string) (bool, error) {
	if now, err := FindDevice(d.Path); err == nil && now.Same(d) {
		return Busy(d.Path)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return false, err
	}
	node := filepath.Join(dir, fmt.Sprintf("held-%d-%d", d.Major, d.Minor))
	if err := linux.Mknod(node, d.Major, d.Minor); err != nil && !errors.Is(err, linux.EEXIST) {
		return false, err
	}
	busy, err := Busy(node)
	if errors.Is(err, linux.ENXIO) || errors.Is(err, linux.ENODEV) {
		busy, err = false, nil // the device itself is gone
	}
	return busy, errors.Join(err, os.Remove(node))
}

// Freeze writes out the file system mounted from the device and stops writes
// to it until thaw is called. It works wherever the file system is mounted.
func Freeze(fs Filesystem) (thaw func() error, err error) {
	m, dir, err := openDir(fs)
	if err != nil {
		return nil, err
	}
	if err := linux.Freeze(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("%s on %s: %w", fs.Type, fs.Device.Path, err), dir.Close(), m.Close())
	}
	return func() error {
		return errors.Join(linux.Thaw(dir), dir.Close(), m.Close())
	}, nil
}

// Thaw undoes a Freeze whose process died. One that is not frozen is fine.
func Thaw(fs Filesystem) error {
	m, dir, err := openDir(fs)
	if err != nil {
		return err
	}
	err = linux.Thaw(dir)
	if errors.Is(err, linux.EINVAL) {
		err = nil
	}
	return errors.Join(err, dir.Close(), m.Close())
}

func openDir(fs Filesystem) (*Detached, *os.File, error) {
	fs.ReadOnly = true
	m, err := Open(fs)
	if err != nil {
		return nil, nil, err
	}
	dir, err := m.Dir()
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return m, dir, nil
}

// ErrNotWritten says that what was written before did not reach the disk. The kernel tells it once.
var ErrNotWritten = errors.New("what was written last could not be written out")

// Flush writes out what the kernel holds of a device that is not mounted, and of
// device-mapper devices that are made of it: each has pages of its own. What could not
// be written is ErrNotWritten.
func Flush(d Device) error {
	above, err := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", d.Major, d.Minor))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, holder := range above {
		if err := writeOut("/dev/" + holder.Name()); err != nil {
			return err
		}
	}
	return writeOut(d.Path)
}

func writeOut(node string) error {
	f, err := linux.Open(node, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("%s: %w: %w", node, ErrNotWritten, err)
	}
	return nil
}
