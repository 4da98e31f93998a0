// Package loopdev binds files to loop block devices, by ioctl.
package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

const control = "/dev/loop-control"

// sectorSize of every device over a file, in bytes. Left to itself, Linux 6.18
// takes what direct I/O to the file wants, which on xfs becomes 4096 when the
// file shares extents with a snapshot; a file system that was made with
// sectors of 512 bytes cannot be mounted then (xfs: ENOSYS, ext4: EINVAL).
const sectorSize = 512

// Device is a bound loop device.
type Device struct {
	Path         string
	Major, Minor uint32
	ReadOnly     bool

	backing file
	part    bool // it shows a part of the file only: somebody else's doing
}

// file identifies a backing file: by device and inode, or, where the backing
// file is itself a block device, by the inode of its node.
type file struct{ dev, ino uint64 }

// Nodes makes loop device nodes where /dev lacks them, as in a container whose
// /dev is not the host's.
type Nodes struct{ Dir string }

// Available tells whether loop devices can be made here.
func Available() error {
	f, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return fault.New(fault.State, "loop devices cannot be made: %w (is the module loop loaded, and the host's /dev mounted?)", err)
	}
	return f.Close()
}

func identify(f *os.File) (file, error) {
	st, err := linux.StatxFile(f)
	return file{linux.MakeDev(st.DevMajor, st.DevMinor), st.Ino}, err
}

// Attach binds the file to a loop device, or finds the one it is bound to in
// that way already. Direct I/O is used where the file's file system allows it.
func (n Nodes) Attach(path string, readOnly bool) (Device, error) {
	mode := os.O_RDWR
	var flags uint32 = linux.LoopDirectIO
	if readOnly {
		mode = os.O_RDONLY
		flags |= linux.LoopReadOnly
	}
	backing, err := linux.Open(path, mode)
	if err != nil {
		return Device{}, err
	}
	defer backing.Close()
	found, err := n.Find(path)
	if err != nil {
		return Device{}, err
	}
	for _, d := range found {
		if d.ReadOnly == readOnly {
			return d, d.keep()
		}
	}
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return Device{}, err
	}
	defer ctl.Close()
	const attempts = 64 // others may take the free device first
	for range attempts {
		var index int
		if index, err = linux.LoopGetFree(ctl); err != nil {
			return Device{}, err
		}
		failpoint.Hit("loop.free")
		var d Device
		d, err = n.configure(index, backing, flags, filepath.Base(path))
		if !errors.Is(err, linux.EBUSY) {
			failpoint.Hit("loop.configured")
			return d, err
		}
	}
	return Device{}, fmt.Errorf("no free loop device could be had in %d attempts: %w", attempts, err)
}

// Temporary binds an open file to a loop device that is free again as soon as
// the returned descriptor, and whatever mounts it, is closed; also by a kill.
func (n Nodes) Temporary(backing *os.File) (*os.File, error) {
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	defer ctl.Close()
	const attempts = 64
	for range attempts {
		index, err := linux.LoopGetFree(ctl)
		if err != nil {
			return nil, err
		}
		node, _, _, err := n.node("loop" + strconv.Itoa(index))
		if err != nil {
			return nil, err
		}
		loop, err := linux.Open(node, os.O_RDWR)
		if err != nil {
			return nil, err
		}
		if err = linux.LoopConfigure(loop, backing, linux.LoopAutoclear, sectorSize, "temporary"); err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, linux.EBUSY) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no free loop device could be had in %d attempts", attempts)
}

func (n Nodes) configure(index int, backing *os.File, flags uint32, name string) (Device, error) {
	node, _, _, err := n.node("loop" + strconv.Itoa(index))
	if err != nil {
		return Device{}, err
	}
	loop, err := linux.Open(node, os.O_RDWR)
	if err != nil {
		return Device{}, err
	}
	defer loop.Close()
	sector := uint32(sectorSize)
	if st, err := linux.StatxFile(backing); err != nil {
		return Device{}, err
	} else if st.IsBlock() { // the same device, seen read-only
		if sector, err = linux.SectorSize(backing); err != nil {
			return Device{}, err
		}
	}
	err = linux.LoopConfigure(loop, backing, flags, sector, name)
	if errors.Is(err, linux.EINVAL) {
		// The file system below, or its block size, does not do direct I/O.
		err = linux.LoopConfigure(loop, backing, flags&^linux.LoopDirectIO, sector, name)
	}
	if err != nil {
		return Device{}, fmt.Errorf("%s for %s: %w", node, backing.Name(), err)
	}
	return status(loop)
}

// node gives the path of a loop device's node, made in n.Dir when /dev has
// none.
func (n Nodes) node(name string) (path string, major, minor uint32, err error) {
	b, err := os.ReadFile("/sys/block/" + name + "/dev")
	if err != nil {
		return "", 0, 0, err
	}
	if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
		return "", 0, 0, fmt.Errorf("/sys/block/%s/dev: %w", name, err)
	}
	for _, path := range []string{"/dev/" + name, filepath.Join(n.Dir, name)} {
		if st, err := linux.StatxPath(path); err == nil && st.IsBlock() && st.RdevMajor == major && st.RdevMinor == minor {
			return path, major, minor, nil
		}
	}
	if err := os.MkdirAll(n.Dir, 0o700); err != nil {
		return "", 0, 0, err
	}
	path = filepath.Join(n.Dir, name)
	if err := linux.Mknod(path, major, minor); err != nil {
		return "", 0, 0, fmt.Errorf("%s: %w", path, err)
	}
	return path, major, minor, nil
}

func status(loop *os.File) (Device, error) {
	info, err := linux.LoopStatus(loop)
	if err != nil {
		return Device{}, err
	}
	st, err := linux.StatxFile(loop)
	if err != nil {
		return Device{}, err
	}
	return Device{
		Path: loop.Name(), Major: st.RdevMajor, Minor: st.RdevMinor,
		ReadOnly: info.Flags&linux.LoopReadOnly != 0, part: info.Part,
		backing: file{info.Device, info.Inode},
	}, nil
}

// Find lists the loop devices that the file is bound to. Of a file that is gone
// it finds those that still hold it, by the path they show.
func (n Nodes) Find(path string) ([]Device, error) {
	f, err := linux.Openat2(nil, path, linux.OPath, 0)
	gone := errors.Is(err, linux.ENOENT)
	if err != nil && !gone {
		return nil, err
	}
	var want file
	if !gone {
		defer f.Close()
		if want, err = identify(f); err != nil {
			return nil, err
		}
	}
	names, err := loopNames()
	if err != nil {
		return nil, err
	}
	var found []Device
	for _, name := range names {
		// The file's name first: opening every loop device of a busy node is slow.
		shown, err := linux.ReadSmall("/sys/block/" + name + "/loop/backing_file")
		if err != nil || filepath.Base(trimBacking(shown)) != filepath.Base(path) || gone && strings.TrimSpace(shown) != path+deleted {
			continue
		}
		node, _, _, err := n.node(name)
		if err != nil {
			continue // it was removed just now
		}
		loop, err := linux.Open(node, os.O_RDONLY)
		if err != nil {
			continue
		}
		d, err := status(loop)
		loop.Close()
		if err == nil && (gone || d.backing == want) && !d.part {
			found = append(found, d)
		}
	}
	return found, nil
}

// Named lists the loop devices over files of that name, in any directory: for
// who cannot see the file itself.
func (n Nodes) Named(base string) ([]Device, error) {
	names, err := loopNames()
	if err != nil {
		return nil, err
	}
	var found []Device
	for _, name := range names {
		shown, err := linux.ReadSmall("/sys/block/" + name + "/loop/backing_file")
		if err != nil || filepath.Base(trimBacking(shown)) != base {
			continue
		}
		node, _, _, err := n.node(name)
		if err != nil {
			continue // it was removed just now
		}
		loop, err := linux.Open(node, os.O_RDONLY)
		if err != nil {
			return nil, err
		}
		d, err := status(loop)
		loop.Close()
		if err == nil {
			found = append(found, d)
		} else if !errors.Is(err, linux.ENXIO) {
			return nil, err
		}
	}
	return found, nil
}

// SameFile tells whether both are over one file.
func (d Device) SameFile(o Device) bool { return d.backing == o.backing }

func loopNames() ([]string, error) {
	dir, err := os.Open("/sys/block")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	all, err := dir.Readdirnames(-1)
	return slices.DeleteFunc(all, func(name string) bool { return !strings.HasPrefix(name, "loop") }), err
}

// Holds tells whether the device is still bound to the file it was found with.
// Somebody may have unbound it, and bound it to something else.
func (d Device) Holds() (bool, error) {
	loop, err := linux.Open(d.Path, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer loop.Close()
	now, err := status(loop)
	if errors.Is(err, linux.ENXIO) {
		return false, nil
	}
	return err == nil && now.backing == d.backing && now.ReadOnly == d.ReadOnly, err
}

// keep undoes a detach that waited for the last user to close the device.
func (d Device) keep() error {
	loop, err := linux.Open(d.Path, os.O_RDWR)
	if err != nil {
		return err
	}
	defer loop.Close()
	info, err := linux.LoopStatus(loop)
	if err != nil || info.Flags&linux.LoopAutoclear == 0 {
		return err
	}
	return linux.LoopKeep(loop)
}

// SetCapacity makes the device as large as its file is now.
func (d Device) SetCapacity() error {
	loop, err := linux.Open(d.Path, os.O_RDWR)
	if err != nil {
		return err
	}
	defer loop.Close()
	return linux.LoopSetCapacity(loop)
}

// DisableDiscard stops the device from punching holes into its file.
func (d Device) DisableDiscard() error {
	return os.WriteFile(fmt.Sprintf("/sys/dev/block/%d:%d/queue/discard_max_bytes", d.Major, d.Minor), []byte("0"), 0)
}

// Detach unbinds the device. While a file system on it is mounted anywhere, or
// anybody has it open, that is refused.
func (d Device) Detach() error {
	loop, err := linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use", d.Path)
	}
	if err != nil {
		return err
	}
	now, err := status(loop)
	if err == nil && now.backing == d.backing {
		err = linux.LoopClear(loop)
	}
	loop.Close()
	if errors.Is(err, linux.ENXIO) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	failpoint.Hit("loop.cleared")
	// udev looks at a device that changed, for a moment.
	for range 50 {
		held, err := d.Holds()
		if err != nil || !held {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fault.New(fault.State, "%s is still open, in some process (see `fuser -v %s`) or under another loop device (see `losetup -l`; the kubelet locks raw block volumes so); it is released when that ends", d.Path, d.Path)
}

// Below gives the number of the block device that a loop device is bound to; ok
// is false when it is none, or is bound to a file.
func (n Nodes) Below(major, minor uint32) (belowMajor, belowMinor uint32, ok bool) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if err != nil || !strings.HasPrefix(filepath.Base(link), "loop") {
		return 0, 0, false
	}
	node, _, _, err := n.node(filepath.Base(link))
	if err != nil {
		return 0, 0, false
	}
	loop, err := linux.Open(node, os.O_RDONLY)
	if err != nil {
		return 0, 0, false
	}
	defer loop.Close()
	info, err := linux.LoopStatus(loop)
	if err != nil || info.RDevice == 0 {
		return 0, 0, false
	}
	belowMajor, belowMinor = linux.SplitDev(info.RDevice)
	return belowMajor, belowMinor, true
}

// BackingFile is the path that the kernel shows for the loop device with that
// number, empty when it is no bound loop device.
func BackingFile(major, minor uint32) string {
	b, err := linux.ReadSmall(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file", major, minor))
	if err != nil {
		return ""
	}
	return trimBacking(b)
}

// deleted is what the kernel puts behind the path of a file that is gone.
const deleted = " (deleted)"

func trimBacking(b string) string {
	return strings.TrimSuffix(strings.TrimSpace(b), deleted)
}
