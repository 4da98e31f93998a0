package loopdev

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// hold is a read-only loop device of one sector that the driver binds on top of
// a loop device before a pod is given that one's node. The ioctls of a loop device
// need no capability, only its node. While another device is bound on top of it,
// LOOP_CLR_FD does not unbind it, and so its number is nobody else's; the kernel
// keeps it so when the driver dies. No pod is given the hold's own node, so what
// its name says can be believed: what the device below was bound to at first.
type hold struct {
	name          string // of the loop device, "loop4"
	backing       file
	readOnly      bool
	sector        uint32
	flags         uint32 // of what can be set: LoopAutoclear, LoopPartscan
	offset, limit uint64
}

const settable = linux.LoopAutoclear | linux.LoopPartscan

// holdPrefix begins the name (lo_file_name, 63 bytes at most) of a hold. What the
// device below was when it was held follows, in base 36: device and inode of its
// file, offset, limit, sector size, flags, access.
const holdPrefix = "crust:"

func (h hold) label() string {
	label := holdPrefix
	for _, n := range []uint64{h.backing.dev, h.backing.ino, h.offset, h.limit, uint64(h.sector), uint64(h.flags)} {
		label += strconv.FormatUint(n, 36) + ":"
	}
	if h.readOnly {
		return label + "r"
	}
	return label + "w"
}

func parseHold(name, label string) (h hold, ok bool) {
	rest, ok := strings.CutPrefix(label, holdPrefix)
	parts := strings.Split(rest, ":")
	if !ok || len(parts) != 7 {
		return h, false
	}
	var n [6]uint64
	for i := range n {
		var err error
		if n[i], err = strconv.ParseUint(parts[i], 36, 64); err != nil {
			return h, false
		}
	}
	h = hold{
		name: name, backing: file{n[0], n[1]}, offset: n[2], limit: n[3], sector: uint32(n[4]), flags: uint32(n[5]), readOnly: parts[6] == "r",
	}
	return h, h.label() == label // what is written in another way is not ours
}

// holding is the holds of a moment.
type holding struct {
	on    map[string]hold // by the name of the device below
	names map[string]bool // of the holds themselves
}

// holds finds the holds among all loop devices. One that could not be looked at, because this process lacked
// something, is an error: what it holds would seem to be held by nothing.
func (n Nodes) holds(all survey) (holding, error) {
	var candidates []hold
	below := map[string]string{}
	is := holding{map[string]hold{}, map[string]bool{}}
	seen.keep(all)
	for name, shown := range all {
		lower, ok := loopName(shown)
		if !ok {
			continue
		}
		h, ok, err := n.readHold(name)
		if err == nil && ok {
			ok, err = isNumber(lower, h.rdev)
		}
		if linux.Short(err) {
			return is, err
		}
		if err == nil && ok {
			candidates = append(candidates, h.hold)
			below[name] = lower
		}
	}
	held := map[string]bool{}
	for _, lower := range below {
		held[lower] = true
	}
	for _, h := range candidates {
		// What is held was given to a pod, which can give it a hold's name.
		if !held[h.name] {
			is.on[below[h.name]], is.names[h.name] = h, true
		}
	}
	return is, nil
}

// read is what a loop device's name said: a hold of the device rdev, or none.
type read struct {
	hold
	rdev    uint64
	isHold  bool
	binding string
}

// seen is what was read of loop devices that are bound to others, by their names. A
// hold cannot be taken off while anybody has it open. So a look opens each hold once
// for each binding. The name cannot change, because no pod has a hold's node.
var seen = readHolds{by: map[string]read{}}

type readHolds struct {
	sync.Mutex
	by map[string]read
}

// keep forgets those that are bound no more.
func (s *readHolds) keep(all survey) {
	s.Lock()
	defer s.Unlock()
	maps.DeleteFunc(s.by, func(name string, _ read) bool { _, there := all[name]; return !there })
}

func (n Nodes) readHold(name string) (read, bool, error) {
	key, err := binding(name)
	if err != nil {
		return read{}, false, err
	}
	seen.Lock()
	r, ok := seen.by[name]
	seen.Unlock()
	if ok && r.binding == key {
		return r, r.isHold, nil
	}
	d, err := n.open(name)
	if err != nil {
		return read{}, false, err
	}
	r = read{rdev: d.now.RDevice, binding: key}
	r.hold, r.isHold = parseHold(name, d.now.Name)
	seen.Lock()
	defer seen.Unlock()
	seen.by[name] = r
	return r, r.isHold, nil
}

// loopName gives the loop device that a path's last part names.
func loopName(path string) (string, bool) {
	name := filepath.Base(trimBacking(path))
	digits, ok := strings.CutPrefix(name, "loop")
	if !ok {
		return "", false
	}
	_, err := strconv.ParseUint(digits, 10, 32)
	return name, err == nil
}

func isNumber(name string, rdev uint64) (bool, error) {
	major, minor := linux.SplitDev(rdev)
	shown, err := linux.ReadSmall("/sys/block/" + name + "/dev")
	return err == nil && strings.TrimSpace(shown) == fmt.Sprintf("%d:%d", major, minor), err
}

// stillHeld tells whether the hold that the device was found with is on it.
func (n Nodes) stillHeld(d Device) (bool, error) {
	on, err := n.open(d.hold.name)
	if away(err) {
		return false, nil
	}
	if err != nil || on.now.RDevice != d.number() {
		return false, err
	}
	h, ok := parseHold(d.hold.name, on.now.Name)
	return ok && h == d.hold, nil
}

// Hold binds a device of the driver's own on top of d, for as long as d is
// attached: Detach takes it off. One that is held is left as it is.
func (n Nodes) Hold(d Device) (Device, error) {
	if d.Held {
		return d, nil
	}
	backing, err := linux.Open(d.Path, os.O_RDONLY)
	if err != nil {
		return d, err
	}
	defer backing.Close()
	now, err := status(backing)
	if err != nil {
		return d, err
	}
	if now.backing != d.backing {
		return d, fault.New(fault.State, "%s was bound to another file meanwhile", d.Path)
	}
	h := hold{backing: d.backing, readOnly: d.ReadOnly, offset: now.now.Offset, limit: now.now.Limit, flags: now.now.Flags & settable}
	if h.sector, err = linux.SectorSize(backing); err != nil {
		return d, err
	}
	// One sector of it: nothing of the pod's data is seen on another device.
	h.name, err = n.bindFree(func(loop *os.File) error {
		return linux.LoopConfigurePart(loop, backing, linux.LoopReadOnly, h.sector, uint64(h.sector), h.label())
	})
	if err != nil {
		return d, fmt.Errorf("%s could not be held: %w", d.Path, err)
	}
	d.Held, d.hold = true, h
	return d, nil
}

// bindFree has bind bind a free loop device, whose name it gives.
func (n Nodes) bindFree(bind func(loop *os.File) error) (string, error) {
	ctl, err := linux.Open(control, os.O_RDWR)
	if err != nil {
		return "", err
	}
	defer ctl.Close()
	var name string
	err = takeFree(ctl, func(index int) error {
		name = "loop" + strconv.Itoa(index)
		node, _, _, err := n.node(name)
		if err != nil {
			return err
		}
		loop, err := linux.Open(node, os.O_RDWR)
		if err != nil {
			return err
		}
		defer loop.Close()
		return bind(loop)
	})
	return name, err
}

// Release takes the driver's holds off a device that stays bound. It is refused
// while somebody else's loop device is on it, and changes nothing then.
func (n Nodes) Release(d Device) error {
	defer mending.Lock(d.number())()
	return n.release(d)
}

// release takes the holds off the device. It is refused while somebody else's
// loop device is on it, and changes nothing then.
func (n Nodes) release(d Device) error {
	if !d.Held {
		return nil
	}
	all, err := look()
	if err != nil {
		return err
	}
	holds, err := n.holds(all)
	if err != nil {
		return err
	}
	var ours []Device
	for name := range all { // the kubelet's is bound to a path of the kubelet's
		on, err := n.open(name)
		if linux.Short(err) {
			return err
		}
		if err != nil || on.now.RDevice != d.number() {
			continue
		}
		if !holds.names[name] {
			return fault.New(fault.State, "%s is still open under another loop device, %s (see `losetup -l`; the kubelet locks raw block volumes so); "+
				"it is released when that one is detached", d.Path, on.Path)
		}
		ours = append(ours, on)
	}
	for _, h := range ours {
		if err := clearHold(h); err != nil {
			return fmt.Errorf("%s: its hold %s: %w", d.Path, h.Path, err)
		}
	}
	return nil
}

// clearHold unbinds a hold, and waits until it is unbound. Its number can be
// somebody else's the moment after.
func clearHold(h Device) error {
	asked := false
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		loop, err := linux.Open(h.Path, os.O_RDONLY)
		if h.gone(err) {
			return nil
		}
		if err != nil {
			return err
		}
		now, err := status(loop)
		is := err == nil && now.now.RDevice == h.now.RDevice && now.now.Name == h.now.Name
		if is && !asked {
			err, asked = linux.LoopClear(loop), true
		}
		loop.Close()
		if err != nil && !h.gone(err) {
			return err
		}
		if !is {
			return nil
		}
		if time.Since(begin) > patience {
			return fault.New(fault.State, "some process has it open (see `fuser -v %s`)", h.Path)
		}
	}
}

// Open gives the loop device of that number, whatever it is bound to; ok is false
// when there is none, or it is bound to nothing.
func (n Nodes) Open(major, minor uint32) (d Device, ok bool, err error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if errors.Is(err, linux.ENOENT) {
		return Device{}, false, nil
	}
	if err != nil {
		return Device{}, false, err
	}
	name, ok := loopName(link)
	if !ok {
		return Device{}, false, nil
	}
	if d, err = n.open(name); away(err) {
		return Device{}, false, nil
	}
	if err != nil {
		return Device{}, false, err
	}
	all, err := look()
	if err != nil {
		return Device{}, false, err
	}
	holds, err := n.holds(all)
	if err != nil {
		return Device{}, false, err
	}
	if h, held := holds.on[name]; held {
		d.hold, d.Held, d.backing, d.ReadOnly = h, true, h.backing, h.readOnly
	}
	return d, true, nil
}

// File is the identity of a file.
type File struct{ file }

// Is tells whether the path leads to it.
func (f File) Is(path string) (bool, error) {
	at, err := linux.Openat2(nil, path, linux.OPath, 0)
	if errors.Is(err, linux.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer at.Close()
	is, err := identify(at)
	return err == nil && is == f.file, err
}

// HeldFile is what the loop device of that number was bound to when it was held;
// ok is false when it is not held.
func (n Nodes) HeldFile(major, minor uint32) (f File, ok bool, err error) {
	all, err := look()
	if err != nil {
		return File{}, false, err
	}
	holds, err := n.holds(all)
	if err != nil {
		return File{}, false, err
	}
	for name, h := range holds.on {
		is, err := isNumber(name, linux.MakeDev(major, minor))
		if is {
			return File{h.backing}, true, nil
		}
		if err != nil && !away(err) {
			return File{}, false, err
		}
	}
	return File{}, false, nil
}
