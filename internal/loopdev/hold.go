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

// hold is a read-only loop device of one sector that the driver binds on top of a loop device before a pod gets that device's node. A
// loop device's ioctls need only its node, no capability. While another device is bound on top of it, LOOP_CLR_FD does not unbind it, so
// its number is not reused; the kernel keeps that if the driver dies. No pod gets the hold's own node, so its name is trustworthy: it
// records what the device below was bound to at first.
type hold struct {
	name          string // of the loop device, "loop4"
	backing       file
	readOnly      bool
	sector        uint32
	flags         uint32 // the settable ones: LoopAutoclear, LoopPartscan
	offset, limit uint64
}

const settable = linux.LoopAutoclear | linux.LoopPartscan

// holdPrefix begins a hold's name (lo_file_name, 63 bytes at most). The state of the device below when it was held follows, in base 36:
// device and inode of its file, offset, limit, sector size, flags, access.
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
		name: name, backing: file{n[0], n[1]}, offset: n[2], limit: n[3], sector: uint32(n[4]), flags: uint32(n[5]),
		readOnly: parts[6] == "r",
	}
	return h, h.label() == label // what the driver would write differently is not a hold
}

// holding is a snapshot of the holds.
type holding struct {
	on    map[string]hold // by the name of the device below
	names map[string]bool // of the holds themselves
}

// holds finds the holds among all loop devices. A device that could not be examined because this process ran out of resources is an
// error: otherwise what it holds would seem not to be held.
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
		// A held device was given to a pod, which can give it a hold's name.
		if !held[h.name] {
			is.on[below[h.name]], is.names[h.name] = h, true
		}
	}
	return is, nil
}

// read is the content of a loop device's name: a hold of the device rdev, or none.
type read struct {
	hold
	rdev    uint64
	isHold  bool
	binding string
}

// seen caches the names of loop devices that are bound to others. A hold cannot be removed while anybody has it open, so each hold is
// opened only once per binding. Its name cannot change, because no pod has a hold's node.
var seen = readHolds{by: map[string]read{}}

type readHolds struct {
	sync.Mutex
	by map[string]read
}

// keep drops entries that are no longer bound.
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

// loopName returns the loop device named by the last part of a path.
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

// stillHeld reports whether the hold that the device was found with is still on it.
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

// Hold binds a device of the driver's own on top of d, for as long as d is attached: Detach removes it. A device that is already held is
// left as it is.
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
	// One sector only: no pod data is visible through the second device.
	h.name, err = n.bindFree(func(loop *os.File) error {
		return linux.LoopConfigurePart(loop, backing, linux.LoopReadOnly, h.sector, uint64(h.sector), h.label())
	})
	if err != nil {
		return d, fmt.Errorf("%s could not be held: %w", d.Path, err)
	}
	d.Held, d.hold = true, h
	return d, nil
}

// bindFree calls bind with a free loop device, and returns its name.
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

// Release removes the driver's holds from a device that stays bound. It is refused, without any change, while another loop device that is
// not the driver's is on it.
func (n Nodes) Release(d Device) error {
	defer mending.Lock(d.number())()
	return n.release(d)
}

// release removes the holds from the device. It is refused, without any change, while a loop device that is not the driver's is on it.
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
	for name := range all { // the kubelet's device shows a kubelet path
		on, err := n.open(name)
		if linux.Short(err) {
			return err
		}
		if err != nil || on.now.RDevice != d.number() {
			continue
		}
		if !holds.names[name] {
			return fault.New(fault.State,
				"%s is still open under another loop device, %s (see `losetup -l`; the kubelet locks raw block volumes so); "+
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

// clearHold unbinds a hold, and waits until it is unbound. Its number may be reused immediately afterwards.
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

// Open returns the loop device with that number, whatever it is bound to; ok is false if there is none, or it is unbound.
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

// Is reports whether the path leads to it.
func (f File) Is(path string) (bool, error) {
	at, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
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

// HeldFile returns the file that the loop device with that number was bound to when it was held; ok is false if it is not held.
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
