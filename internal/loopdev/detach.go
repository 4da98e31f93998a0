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

// mending is held, for one device, while it is set back, and while its holds are
// taken off because it is detached.
var mending keylock.Locks[uint64]

func (d Device) number() uint64 { return linux.MakeDev(d.Major, d.Minor) }

// patience is how long others (udev above all) may look at a device that changed.
const patience = 2 * time.Second

func (d Device) discardLimit() string {
	return fmt.Sprintf("/sys/dev/block/%d:%d/queue/discard_max_bytes", d.Major, d.Minor)
}

// DisableDiscard stops the device from punching holes into its file. Detach takes
// that back.
func (d Device) DisableDiscard() error {
	return os.WriteFile(d.discardLimit(), []byte("0"), 0)
}

// noDiscard tells whether somebody has disabled discards of a loop device whose
// file's file system has them. That belongs to the loop device, not to what it is
// bound to: the kernel (Linux 6.18) leaves it there for the next user, and takes
// no other value any more.
func noDiscard(name string) bool {
	limit, err := linux.ReadSmall("/sys/block/" + name + "/queue/discard_max_bytes")
	if err != nil || limit != "0\n" {
		return false
	}
	own, err := linux.ReadSmall("/sys/block/" + name + "/queue/discard_max_hw_bytes")
	return err == nil && own != "0\n"
}

// renew has the kernel forget a loop device that is bound to nothing, and all that
// was set of it: another device gets its number. EBUSY when it is bound or open.
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
			return nil // somebody has bound it again: it is theirs
		}
	}
}

// Forget takes back what the driver set of a loop device, when it is bound to
// nothing any more. One that somebody has bound again is theirs and left alone.
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

// away tells whether an error means that the device is bound to nothing, or is
// gone. While it is being unbound, which happens at somebody's close, it cannot be
// opened either.
func away(err error) bool {
	return errors.Is(err, linux.ENXIO) || errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ENODEV)
}

// gone is away for who has the device's path: where only the node is missing, the
// device may be bound still.
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

// Now looks at the device again; ok is false when it is not bound to its file any
// more. Somebody may have unbound it, and bound it to something else. A device
// that is held stays the file's, whatever it shows: see Mend.
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

// ErrWritesLost is what Detach gives, once, when the page cache had writes that the device's
// file did not take.
var ErrWritesLost = errors.New("what was written last could not be written to its file, and is lost")

// Detach unbinds the device. While a file system on it is mounted anywhere, or
// anybody has it open, that is refused: a fault State, as ErrWritesLost is. Any other
// error is of this machine.
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
	// A pod that had it raw may have written to it without fsync. Its close was not the last one, so
	// only the page cache has that.
	if err := linux.WriteBack(loop); err != nil && !d.ReadOnly {
		loop.Close()
		return fault.New(fault.State, "%s: %w: %w; call again to release the device", d.Path, ErrWritesLost, err)
	}
	// Whoever mends it must not take this for a pod's doing.
	unlock := mending.Lock(d.number())
	err = n.release(d)
	var now Device
	if err == nil {
		if now, err = status(loop); err == nil && (d.Held || now.backing == d.backing) {
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
