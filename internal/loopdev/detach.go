package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/keylock"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// mending is held, per device, while the device is restored, and while its holds are removed for a
// detach.
var mending keylock.Locks[uint64]

func (d Device) number() uint64 { return linux.MakeDev(d.Major, d.Minor) }

// patience is how long others (mostly udev) may examine a device that changed.
const patience = 2 * time.Second

func (d Device) discardLimit() string {
	return fmt.Sprintf("/sys/dev/block/%d:%d/queue/discard_max_bytes", d.Major, d.Minor)
}

// DisableDiscard stops the device from punching holes into its file. Detach undoes that.
func (d Device) DisableDiscard() error {
	return os.WriteFile(d.discardLimit(), []byte("0"), 0)
}

// noDiscard reports whether discards are disabled on a loop device although the file system of its
// file supports them. That setting belongs to the loop device, not to what it is bound to: the
// kernel (Linux 6.18) keeps it for the next user, and accepts no other value any more.
func noDiscard(name string) bool {
	limit, err := linux.ReadSmall("/sys/block/" + name + "/queue/discard_max_bytes")
	if err != nil || limit != "0\n" {
		return false
	}
	own, err := linux.ReadSmall("/sys/block/" + name + "/queue/discard_max_hw_bytes")
	return err == nil && own != "0\n"
}

// renew makes the kernel forget an unbound loop device and all its settings: another device gets
// its number. EBUSY if it is bound or open.
func renew(name string) error {
	index, err := strconv.Atoi(strings.TrimPrefix(name, "loop"))
	if err != nil {
		return err
	}
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return err
	}
	defer ctl.Close()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		err := linux.LoopRemove(ctl, index)
		if errors.Is(err, linux.ENODEV) {
			return nil
		}
		if !errors.Is(err, linux.EBUSY) || time.Since(begin) > patience {
			return err
		}
		if _, err := linux.ReadSmall("/sys/block/" + name + "/loop/backing_file"); err == nil {
			return nil // somebody has bound it again and owns it now
		}
	}
}

// Forget undoes the driver's settings of a loop device that is no longer bound. A device that
// somebody has bound again is left alone.
func (d Device) Forget() error {
	name := filepath.Base(d.Path)
	if !noDiscard(name) {
		return nil
	}
	bound, err := d.bound()
	if err != nil || bound {
		return err
	}
	return renew(name)
}

// away reports whether an error means that the device is unbound or gone. While it is being
// unbound, at somebody's close, it cannot be opened either.
func away(err error) bool {
	return errors.Is(err, linux.ENXIO) || errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ENODEV)
}

// gone is away for callers that have the device's path: if only the node is missing, the device may
// still be bound.
func (d Device) gone(err error) bool {
	if !errors.Is(err, linux.ENOENT) {
		return away(err)
	}
	_, err = linux.StatxPath(fmt.Sprintf("/sys/dev/block/%d:%d/loop", d.Major, d.Minor))
	return errors.Is(err, linux.ENOENT)
}

func (d Device) bound() (bool, error) {
	loop, err := linux.Open(d.Path, os.O_RDONLY)
	if err == nil {
		defer loop.Close()
		_, err = status(loop)
	}
	if d.gone(err) {
		return false, nil
	}
	return err == nil, err
}

// Now examines the device again; ok is false if it is no longer bound to its file. Somebody may
// have unbound it and bound it to something else. A held device stays the file's, whatever it
// shows: see Restore.
func (n Nodes) Now(d Device) (now Device, ok bool, err error) {
	loop, err := linux.Open(d.Path, os.O_RDONLY)
	if err == nil {
		defer loop.Close()
		now, err = status(loop)
	}
	if d.gone(err) {
		return d, false, nil
	}
	if err != nil {
		return d, false, err
	}
	same := now.backing == d.backing && now.ReadOnly == d.ReadOnly
	held := d.Held && same
	if d.Held && !same {
		if held, err = n.stillHeld(d); err != nil {
			return d, false, err
		}
	}
	if held {
		now.Held, now.hold, now.backing, now.ReadOnly = true, d.hold, d.backing, d.ReadOnly
		return now, true, nil
	}
	return now, same, nil
}

// ErrWritesLost is returned by Detach, once, if the device's file did not accept writes from the
// page cache.
var ErrWritesLost = errors.New("what was written last could not be written to its file, and is lost")

// Detach unbinds the device. It refuses while a file system on it is mounted anywhere, or anybody
// has it open, with a fault State; ErrWritesLost is one, too. Any other error is a problem of this
// machine.
func (n Nodes) Detach(d Device) error {
	var loop *os.File
	err := linux.Outlast(func() (err error) {
		loop, err = linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
		return err
	})
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use", d.Path)
	}
	if d.gone(err) {
		return d.Forget()
	}
	if err != nil {
		return err
	}
	// A pod with raw access may have written without fsync. Its close was not the last, so only the
	// page cache has that data.
	if err := linux.WriteBack(loop); err != nil && !d.ReadOnly {
		loop.Close()
		return fault.New(fault.State, "%s: %w: %w; call again to release the device", d.Path, ErrWritesLost, err)
	}
	// Restore must not take this for a change by a pod.
	unlock := mending.Lock(d.number())
	err = n.release(d)
	var now Device
	others := false // it was unbound, and is bound to another file by now
	if err == nil {
		now, err = status(loop)
		if others = err == nil && !d.Held && now.backing != d.backing; err == nil && !others {
			err = linux.LoopClear(loop)
		}
	}
	unlock()
	loop.Close()
	if d.gone(err) {
		return d.Forget()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	if others {
		return nil
	}
	if err := failpoint.Err("loop.cleared"); err != nil {
		return err
	}
	d.Held = false
	d.backing = now.backing
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		_, bound, err := n.Now(d)
		if err != nil {
			return err
		}
		if !bound {
			return d.Forget()
		}
		if time.Since(begin) > patience {
			break
		}
	}
	return fault.New(fault.State, "%s is still open, in some process (see `fuser -v %s`) or under another loop device (see `losetup -l`; "+
		"the kubelet locks raw block volumes so); it is released when that ends", d.Path, d.Path)
}
