package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// ErrGrowOffline is in the error chain of Grow if a file system grows only while it is not mounted:
// see GrowsOffline. One that is marked as damaged must be checked first, too.
var ErrGrowOffline = errors.New("it grows only while it is not mounted")

// ErrGrowRefused is in the error chain of Grow if the kernel does not grow a file system now, or never, and left it as it was; and in that
// of a program which did not, if a check found the file system whole.
var ErrGrowRefused = errors.New("it does not grow")

// Grow grows a mounted file system of type name to the size of its device. The file dir is open
// on any directory of it. It does nothing if the file system fills the device already.
func Grow(dir *os.File, name string, d Device) error {
	size, err := DeviceSize(d)
	if err != nil {
		return err
	}
	if err := NeverGrows(name); err != nil {
		return fmt.Errorf("the device %s: %w", d.Path, err)
	}
	grow := fstype.Of(name).Grow
	if grow == nil {
		if sb, err := probe(d.Path, size); err != nil || sb.BlockSize > 0 && !Unfilled(sb, size) {
			return err
		}
		return fault.New(fault.State, "%s on %s: %w; stop its pods, so that it can be grown when it is next staged", name, d.Path, ErrGrowOffline)
	}
	err = grow(dir, size, func() (int64, int64, error) {
		// Reading the device returns the kernel's current buffers, because both use the same
		// pages.
		sb, err := probe(d.Path, size)
		if err == nil && sb.BlockSize == 0 {
			err = fault.New(fault.State, "the superblock is not that of %s any more: %s", name, sb)
		}
		return sb.Size, sb.BlockSize, err
	})
	switch {
	case errors.Is(err, linux.EPERM) && GrowsOffline(name):
		return fault.New(fault.State, "%s on %s: %w, because this process lacks CAP_SYS_RESOURCE; stop its pods, so that it can be grown when "+
			"it is next staged. A privileged container has the capability where its node's root has it", name, d.Path, ErrGrowOffline)
	case errors.Is(err, linux.EPERM) && len(fstype.Of(name).Resize) > 0:
		return fault.New(fault.State, "%s on %s: %w, because the kernel does not permit it now, for example because the file system is marked "+
			"as damaged; stop its pods, so that it can be checked and grown when it is next staged", name, d.Path, ErrGrowOffline)
	case errors.Is(err, linux.EBUSY):
		return fault.New(fault.Busy, "%s on %s: %w, because another operation on it is under way, such as a balance; try again when that has "+
			"ended (%w)", name, d.Path, ErrGrowRefused, err)
	case errors.Is(err, linux.EOPNOTSUPP):
		return fault.New(fault.State, "%s on %s: %w, because of how the file system was made; make a larger volume, and copy the data there (%w)",
			name, d.Path, ErrGrowRefused, err)
	}
	if err != nil {
		return fmt.Errorf("grow %s on %s to %d bytes: %w", name, d.Path, size, err)
	}
	return nil
}

// NeverGrows returns a fault.State for a file system that no kernel or program is known to grow without a loss of data.
func NeverGrows(name string) error {
	if fstype.Of(name).Grows() {
		return nil
	}
	return fault.New(fault.State, "a file system of type %s never grows; make a larger volume, and copy the data there", name)
}

// GrowsOffline reports whether a file system of that type grows only while it is not mounted, by
// a program: its kernel driver cannot grow it, or this process certainly lacks the capability.
func GrowsOffline(name string) bool {
	t := fstype.Of(name)
	if t.Grow == nil {
		return len(t.Resize) > 0
	}
	if !t.GrowthIsPrivileged {
		return false
	}
	ok, err := linux.HasCapability(linux.CapSysResource)
	return err == nil && !ok
}

// Grows reports whether Grow can grow a file system of that type. A process that cannot tell
// whether it has the capability may try.
func Grows(name string) bool { return fstype.Of(name).Grow != nil && !GrowsOffline(name) }

// Unfilled reports whether an unmounted file system is worth growing: its device is at least 16
// MiB larger. The file system might never use a smaller rest (ext4 makes no last group of a few
// blocks), and the driver would retry forever.
func Unfilled(r superblock.Result, deviceSize int64) bool {
	const worthwhile = 16 << 20
	return r.BlockSize > 0 && deviceSize-r.Size >= worthwhile
}

// DeviceSize returns the current length of the device, in bytes. A device without a Path is a
// fault.State.
func DeviceSize(d Device) (int64, error) {
	if d.Path == "" {
		return 0, fault.New(fault.State, "device %d:%d has no node in /dev: make one (mknod), and give it as the Path", d.Major, d.Minor)
	}
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

// FindDevice examines a block device node. It follows symbolic links and keeps the path as given; FindNamed returns the node that a link
// leads to. A missing path or another kind of file is a fault.State; errors.Is(err, fs.ErrNotExist) tells which. It is no fault.NotFound,
// because for CSI that is a missing volume.
func FindDevice(path string) (Device, error) {
	f, err := linux.OpenBlock(path, os.O_RDONLY)
	if err != nil {
		return Device{}, noDevice(path, err)
	}
	defer f.Close()
	st, err := linux.StatxFile(f)
	if err != nil {
		return Device{}, err
	}
	ro, err := linux.BlockReadOnly(f)
	if err != nil {
		return Device{}, err
	}
	return Device{Path: path, Major: st.RdevMajor, Minor: st.RdevMinor, ReadOnly: ro}, nil
}

// Held reports whether the device is in use: mounted in any namespace, or opened exclusively.
// It identifies the device by its number. If the path leads to another device by now, it uses a
// temporary node in dir.
func (d Device) Held(dir string) (bool, error) {
	if now, err := FindDevice(d.Path); err == nil && now.Same(d) {
		return Busy(d.Path)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return false, err
	}
	node := filepath.Join(dir, fmt.Sprintf("held-%d-%d", d.Major, d.Minor))
	for {
		if err := linux.Mknod(node, d.Major, d.Minor); err != nil && !errors.Is(err, linux.EEXIST) {
			return false, err
		}
		busy, err := Busy(node)
		if errors.Is(err, linux.ENOENT) {
			continue // another caller has removed it
		}
		if errors.Is(err, linux.ENXIO) || errors.Is(err, linux.ENODEV) {
			busy, err = false, nil // the device itself is gone
		}
		if rerr := os.Remove(node); !errors.Is(rerr, linux.ENOENT) {
			err = errors.Join(err, rerr)
		}
		return busy, err
	}
}

// Freeze writes back the file system on the device and blocks writes to it until thaw is
// called. It works wherever the file system is mounted. The options of fs must be those of the live superblock: the
// kernel refuses another SELinux label, or none.
func Freeze(fs Filesystem) (thaw func() error, err error) {
	m, dir, err := openDir(fs)
	if err != nil {
		return nil, err
	}
	if err := linux.Freeze(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("%s on %s: %w", fs.Type, fs.Device.Path, err), dir.Close(), m.Close())
	}
	return func() error {
		err := failpoint.Err("freeze.resume")
		if err == nil {
			err = linux.Thaw(dir)
		}
		return errors.Join(err, dir.Close(), m.Close())
	}, nil
}

// Thaw undoes a Freeze whose process died. It does nothing if the file system is not frozen.
func Thaw(fs Filesystem) error {
	m, dir, err := openDir(fs)
	if err != nil {
		return err
	}
	if err = failpoint.Err("thaw"); err == nil {
		err = linux.Thaw(dir)
	}
	if errors.Is(err, linux.EINVAL) {
		err = nil
	}
	return errors.Join(err, dir.Close(), m.Close())
}

// openDir mounts a file system that may be mounted already. After an error, the kernel makes the live superblock read-only, and refuses
// a further mount of it that is not: ext4 and xfs as a busy device, btrfs as an invalid argument.
func openDir(fs Filesystem) (*Detached, *os.File, error) {
	fs.ReadOnly = true
	m, err := Open(fs)
	if err != nil {
		fs.Device.ReadOnly = true
		var again error
		if m, again = Open(fs); again != nil {
			return nil, nil, err
		}
	}
	dir, err := m.Dir()
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return m, dir, nil
}

// ErrNotWritten means that earlier writes did not reach the disk. The kernel reports it once.
var ErrNotWritten = errors.New("what was written last could not be written out")

// Flush writes back what the kernel caches of an unmounted device, and of device-mapper devices
// on top of it, because each has its own page cache. A failed write is ErrNotWritten.
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
