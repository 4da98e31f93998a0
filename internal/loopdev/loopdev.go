// Package loopdev binds files to loop block devices, by ioctl.
package loopdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

const control = "/dev/loop-control"

// sectorSize is the sector size of every device over a file, in bytes. By default, Linux 6.18 uses what direct I/O to the file wants,
// which on xfs becomes 4096 when the file shares extents with a snapshot. A file system made with sectors of 512 bytes then cannot be
// mounted (xfs: ENOSYS, ext4: EINVAL).
const sectorSize = 512

// Device is a bound loop device.
type Device struct {
	Path         string
	Major, Minor uint32
	ReadOnly     bool
	// Held means that a loop device of the driver's is bound on top of it, so that it stays bound whatever is done to it; see Hold.
	Held bool

	backing file // the file whose device it is
	now     linux.LoopInfo
	hold    hold // set if Held
}

// file identifies a backing file by device and inode or, if the backing file is itself a block device, by the inode of its node.
type file struct{ dev, ino uint64 }

// Nodes makes loop device nodes that /dev lacks, as in a container whose /dev is not the host's.
type Nodes struct {
	Dir string

	opens func(name string) (Device, error) // for tests
}

// Available returns nil if loop devices can be made here.
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

// Attach binds the file to a loop device. For writing there is only one: if the file is already bound, that device is returned. Each
// read-only call makes another device, because a pod can change what its device shows (see Restore). Direct I/O is used if the file's file
// system supports it.
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
	if !readOnly && !alone(backing) {
		found, err := n.Find(path)
		if err != nil {
			return Device{}, err
		}
		if d, ok := Writable(found); ok && (d.Held || !d.now.Part()) {
			if d.Held {
				held, err := n.stillHeld(d)
				if err == nil && !held {
					err = fault.New(fault.Busy, "%s is just being released; try again", d.Path)
				}
				return d, err // see Restore
			}
			// A device with a pending unbind at its last close may be unbound by now.
			if err := d.keep(); !d.gone(err) {
				return d, err
			}
		}
	}
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return Device{}, err
	}
	defer ctl.Close()
	var d Device
	err = takeFree(ctl, func(index int) (err error) {
		if name := "loop" + strconv.Itoa(index); noDiscard(name) {
			// Its last user left it so. If renewing it fails, space is not given back, with no other harm.
			if renew(name) == nil {
				return linux.EBUSY // gone; retry with a new one
			}
		}
		if err := failpoint.Err("loop.free"); err != nil {
			return err
		}
		if d, err = n.configure(index, backing, flags, filepath.Base(path)); !taken(err) {
			failpoint.Hit("loop.configured")
		}
		return err
	})
	return d, err
}

// alone reports whether nobody but f, which is open for writing, has its file open. Then no loop device is bound to it. It is false if the
// kernel cannot tell. (A held device that a pod made show another file is read-only, so Attach, which wants a writable one, need not know
// it.)
func alone(f *os.File) bool {
	is, err := linux.Alone(f)
	return err == nil && is
}

// Unbound reports that no loop device is bound to the file. False means "perhaps". It does not look at the node's loop devices, of which
// there may be thousands. A held device that a pod made show another file is bound to that.
func Unbound(path string) bool {
	f, err := linux.Open(path, os.O_RDWR)
	if err != nil {
		return false
	}
	defer f.Close()
	return alone(f)
}

// takeFree asks for a free device until f, which binds it, finds it still free: concurrent callers get the same one, and one of them
// wins. No lock is held, because a device that hangs must not stop the others. As long as the number changes each time, there is
// progress; without any, it makes a further device, and gives up if that does not help. The kernel takes a device for free that some
// process has open exclusively, and gives out no other one meanwhile.
func takeFree(ctl *os.File, f func(index int) error) error {
	const patience, makeOne = 5 * time.Second, 500 * time.Millisecond
	last, since := -1, time.Now()
	for {
		index, err := linux.LoopGetFree(ctl)
		if err != nil {
			return err
		}
		if index != last {
			last, since = index, time.Now()
		}
		if err = f(index); taken(err) && time.Since(since) > makeOne {
			if made, aerr := linux.LoopAdd(ctl); aerr == nil { // or the kernel makes no more
				err = f(made)
			}
		}
		// A device that is being made or removed is briefly absent.
		if !taken(err) {
			return err
		}
		if time.Since(since) > patience {
			return fault.New(fault.State,
				"no loop device can be had: /dev/loop%d is given out as free for %s, and %w; look at `losetup -l`, and "+
					"who has it open: `fuser -v /dev/loop%d`", index, patience, err, index)
		}
		time.Sleep(time.Millisecond)
	}
}

// taken reports whether an error means that another process has just taken or removed a free device.
func taken(err error) bool {
	return errors.Is(err, linux.EBUSY) || errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ENXIO) || errors.Is(err, linux.ENODEV)
}

// Temporary binds an open file to a loop device that becomes free as soon as the returned descriptor, and everything that mounts it, is
// closed; also after a kill.
func (n Nodes) Temporary(backing *os.File) (*os.File, error) {
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	defer ctl.Close()
	var loop *os.File
	err = takeFree(ctl, func(index int) error {
		node, _, _, err := n.node("loop" + strconv.Itoa(index))
		if err != nil {
			return err
		}
		if loop, err = linux.Open(node, os.O_RDWR); err != nil {
			return err
		}
		if err = linux.LoopConfigure(loop, backing, linux.LoopAutoclear, sectorSize, "temporary"); err != nil {
			loop.Close()
			loop = nil
		}
		return err
	})
	return loop, err
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
	sector, err := sectorFor(backing)
	if err != nil {
		return Device{}, err
	}
	err = linux.LoopConfigure(loop, backing, flags, sector, name)
	if errors.Is(err, linux.EINVAL) {
		// The file system below, or its block size, does not support direct I/O.
		err = linux.LoopConfigure(loop, backing, flags&^linux.LoopDirectIO, sector, name)
	}
	if err != nil {
		return Device{}, fmt.Errorf("%s for %s: %w", node, backing.Name(), err)
	}
	return status(loop)
}

// sectorFor returns the sector size for a device over the file, in bytes.
func sectorFor(backing *os.File) (uint32, error) {
	st, err := linux.StatxFile(backing)
	if err != nil || !st.IsBlock() {
		return sectorSize, err
	}
	return linux.SectorSize(backing) // the same device, seen read-only
}

// node returns the path of a loop device's node, made in n.Dir if /dev has none.
func (n Nodes) node(name string) (path string, major, minor uint32, err error) {
	b, err := os.ReadFile("/sys/block/" + name + "/dev")
	if err != nil {
		return "", 0, 0, err
	}
	if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
		return "", 0, 0, fmt.Errorf("/sys/block/%s/dev: %w", name, err)
	}
	path, err = n.NodeOf(name, major, minor)
	return path, major, minor, err
}

var making sync.Mutex // serializes the creation of nodes: concurrent callers get the same free device

// NodeOf returns the path of a block device's node, made in n.Dir if /dev has none.
func (n Nodes) NodeOf(name string, major, minor uint32) (string, error) {
	for _, path := range []string{"/dev/" + name, filepath.Join(n.Dir, name)} {
		if st, err := linux.StatxPath(path); err == nil && st.IsBlock() && st.RdevMajor == major && st.RdevMinor == minor {
			return path, nil
		}
	}
	making.Lock()
	defer making.Unlock()
	if err := os.MkdirAll(n.Dir, 0o700); err != nil {
		return "", err
	}
	path := filepath.Join(n.Dir, name)
	if st, err := linux.StatxPath(path); err == nil && st.IsBlock() && st.RdevMajor == major && st.RdevMinor == minor {
		return path, nil // just made
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err // a node of another number, from an earlier boot
	}
	if err := linux.Mknod(path, major, minor); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return path, nil
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
		ReadOnly: info.Flags&linux.LoopReadOnly != 0, now: info,
		backing: file{info.Device, info.Inode},
	}, nil
}

// keep undoes a detach that is waiting for the last user to close the device.
func (d Device) keep() error {
	loop, err := linux.Open(d.Path, os.O_RDWR)
	if err != nil {
		return err
	}
	defer loop.Close()
	now, err := status(loop)
	if err == nil && now.backing != d.backing {
		return fmt.Errorf("%s: %w", d.Path, linux.ENXIO) // another process owns it now
	}
	if err != nil || now.now.Flags&linux.LoopAutoclear == 0 {
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

// Below returns the number of the block device that a loop device is bound to; ok is false if it is not a loop device, or is bound to a
// file.
func (n Nodes) Below(major, minor uint32) (belowMajor, belowMinor uint32, ok bool, err error) {
	info, ok, err := n.statusOf(major, minor)
	if err != nil || !ok || info.RDevice == 0 {
		return 0, 0, false, err
	}
	belowMajor, belowMinor = linux.SplitDev(info.RDevice)
	return belowMajor, belowMinor, true, nil
}

// statusOf returns the kernel's status of the loop device with that number; ok is false if it is not a bound loop device.
func (n Nodes) statusOf(major, minor uint32) (info linux.LoopInfo, ok bool, err error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if err == nil && !strings.HasPrefix(filepath.Base(link), "loop") {
		return info, false, nil
	}
	var d Device
	if err == nil {
		d, err = n.open(filepath.Base(link))
	}
	if away(err) {
		return info, false, nil
	}
	return d.now, err == nil, err
}

// BackingFile returns the path that the kernel shows for the loop device with that number, "" if it is not a bound loop device.
func BackingFile(major, minor uint32) (string, error) {
	b, err := linux.ReadSmall(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file", major, minor))
	if away(err) {
		err = nil
	}
	return trimBacking(b), err
}

// deleted is the kernel's suffix for the path of a deleted file.
const deleted = " (deleted)"

func trimBacking(b string) string {
	return strings.TrimSuffix(strings.TrimSpace(b), deleted)
}
