package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Bus is the SCSI bus that QEMU must have for disks: a virtio-scsi controller called crust-scsi.
const Bus = "crust-scsi.0"

// Disk is a block device of the host that a guest sees as a SCSI disk.
type Disk struct {
	Name  string // the disk's serial number in the guest, and what QEMU calls it
	Path  string // the device's on the host
	Major uint32
	Minor uint32
	// ReadOnly: the guest cannot write to it.
	ReadOnly bool
	// LogicalBlock and PhysicalBlock are the device's sizes of blocks, in bytes. 0 is QEMU's default, 512.
	LogicalBlock, PhysicalBlock int
	// Shared: others on this host may use the device at the same time, as pods may that have one raw block volume. A device that
	// is mounted or claimed, which is then exclusive, is refused all the same.
	Shared bool
	// File is the open device, see Client.File. nil: Plug opens it.
	File *os.File
}

// Plugged tells whether QEMU has a disk of that name.
func (c *Client) Plugged(ctx context.Context, name string) (bool, error) {
	var list []struct {
		Name string `json:"name"`
	}
	if err := c.Run(ctx, "qom-list", map[string]any{"path": "/machine/peripheral"}, &list); err != nil {
		return false, err
	}
	for _, d := range list {
		if d.Name == name {
			return true, nil
		}
	}
	return false, nil
}

// refusedWith identifies a refusal of QEMU by its text; QEMU has no codes for them.
func refusedWith(err error, words string) bool {
	var e *Error
	return errors.As(err, &e) && strings.Contains(e.Desc, words)
}

// Resize tells the guest that a disk's device has that many bytes now.
func (c *Client) Resize(ctx context.Context, name string, size int64) error {
	return c.Run(ctx, "block_resize", map[string]any{"node-name": name, "size": size}, nil)
}

// Plug gives the guest a disk, unless it has it. A device that is in use is a fault State.
func (c *Client) Plug(ctx context.Context, d Disk) error {
	there, err := c.Plugged(ctx, d.Name)
	if err != nil || there {
		return err
	}
	// An interrupted call may have left a node, or one of another device that had this name before.
	if err := c.removeNode(ctx, d.Name); err != nil {
		return err
	}
	if err := c.addNode(ctx, d); err != nil {
		return err
	}
	// The guest gets an error that the device gives. QEMU's default stops the whole machine if a thin device is full.
	device := map[string]any{"driver": "scsi-hd", "id": d.Name, "drive": d.Name, "bus": Bus, "serial": d.Name, "share-rw": d.Shared,
		"werror": "report", "rerror": "report"}
	for name, size := range map[string]int{"logical_block_size": d.LogicalBlock, "physical_block_size": d.PhysicalBlock} {
		if size > 0 {
			device[name] = size
		}
	}
	return c.Run(ctx, "device_add", device, nil)
}

// hanging has the paths of devices whose open(2) did not return before its caller gave up. Each keeps a thread.
var hanging sync.Map

// openIn opens the device, and gives up when ctx ends: open(2) may wait for a disk or server that is gone, and no signal ends it.
// No second call for the same path begins meanwhile.
func (d Disk) openIn(ctx context.Context) (*os.File, error) {
	silent := fault.New(fault.Unavailable, "%s does not open, because its disk or server does not answer: see the kernel's log (dmesg)",
		d.Path)
	if _, ok := hanging.Load(d.Path); ok {
		return nil, silent
	}
	type answer struct {
		*os.File
		error
	}
	done := make(chan answer, 1)
	go func() {
		f, err := d.open()
		done <- answer{f, err}
	}()
	select {
	case a := <-done:
		return a.File, a.error
	case <-ctx.Done():
	}
	hanging.Store(d.Path, true)
	go func() {
		if a := <-done; a.error == nil {
			a.File.Close()
		}
		hanging.Delete(d.Path)
	}()
	return nil, errors.Join(silent, ctx.Err())
}

// open opens the device. The open is exclusive unless the disk is shared: as long as anybody has the descriptor, the kernel lets nobody
// on this host mount the device or open it so, even after this process ends (C19).
func (d Disk) open() (*os.File, error) {
	mode := os.O_RDWR
	if d.ReadOnly {
		mode = os.O_RDONLY
	}
	// Exclusively even if it is only read: reading while somebody else writes returns garbage.
	f, err := linux.Open(d.Path, mode|linux.OExcl)
	for range 10 {
		if !d.Shared || !errors.Is(err, linux.EBUSY) {
			break
		}
		time.Sleep(20 * time.Millisecond) // another pod's guest may be given it just now
		f, err = linux.Open(d.Path, mode|linux.OExcl)
	}
	if errors.Is(err, linux.EBUSY) {
		return nil, fault.New(fault.State, "%s is in use on the host: mounted, or claimed for another sandbox", d.Path)
	}
	if err != nil {
		return nil, err
	}
	if d.Shared {
		claimed := f
		defer claimed.Close()
		if f, err = linux.Open(d.Path, mode); err != nil {
			return nil, err
		}
	}
	if err := d.is(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// is returns nil if a file is the device.
func (d Disk) is(f *os.File) error {
	st, err := linux.StatxFile(f)
	if err == nil && (!st.IsBlock() || st.RdevMajor != d.Major || st.RdevMinor != d.Minor) {
		err = fault.New(fault.State, "%s is no longer the block device %d:%d", d.Path, d.Major, d.Minor)
	}
	return err
}

// addNode passes the device's descriptor to QEMU, which needs no right to open it and cannot be led to another.
func (c *Client) addNode(ctx context.Context, d Disk) error {
	f := d.File
	if f == nil {
		var err error
		if f, err = d.openIn(ctx); err != nil {
			return err
		}
		defer f.Close()
	}
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := c.RunWithFile(ctx, "add-fd", map[string]any{"opaque": d.Name}, &set, f); err != nil {
		return err
	}
	node := map[string]any{
		"driver": "host_device", "node-name": d.Name, "filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "read-only": d.ReadOnly,
		"discard": "unmap", "cache": map[string]any{"direct": true},
	}
	if d.Shared {
		node["locking"] = "off" // QEMU's own, which keeps other QEMUs out
	}
	return c.Run(ctx, "blockdev-add", node, nil)
}

// removeNode removes what QEMU has of a disk, except the disk itself.
func (c *Client) removeNode(ctx context.Context, name string) error {
	if err := c.Run(ctx, "blockdev-del", map[string]any{"node-name": name}, nil); err != nil && !refusedWith(err, "Failed to find node") {
		return err
	}
	return c.removeFiles(ctx, name)
}

// removeFiles closes QEMU's descriptors of a disk.
func (c *Client) removeFiles(ctx context.Context, name string) error {
	return c.eachFile(ctx, name, func(set, fd int) error {
		return c.Run(ctx, "remove-fd", map[string]any{"fdset-id": set, "fd": fd}, nil)
	})
}

// eachFile calls f for each descriptor of a disk that QEMU has.
func (c *Client) eachFile(ctx context.Context, name string, f func(set, fd int) error) error {
	var sets []struct {
		ID  int `json:"fdset-id"`
		FDs []struct {
			FD     int    `json:"fd"`
			Opaque string `json:"opaque"`
		} `json:"fds"`
	}
	if err := c.Run(ctx, "query-fdsets", nil, &sets); err != nil {
		return err
	}
	for _, set := range sets {
		for _, fd := range set.FDs {
			if fd.Opaque != name {
				continue
			}
			if err := f(set.ID, fd.FD); err != nil {
				return err
			}
		}
	}
	return nil
}

// File returns the descriptor of a disk that QEMU reads, for another QEMU that only reads it, too; nil if there is none. QEMU has that
// process number. Whoever has the descriptor has the claim on the device, so the device stays claimed until the last one closes it. QEMU
// may be its guest's by now, so the kernel is asked what the descriptor is.
func (c *Client) File(ctx context.Context, pid int, d Disk) (file *os.File, err error) {
	err = c.eachFile(ctx, d.Name, func(_, fd int) error {
		if file != nil {
			return nil
		}
		f, err := linux.FileOf(pid, fd)
		if err != nil {
			return err
		}
		readOnly, err := linux.ReadOnly(f)
		if err == nil && !readOnly {
			err = fault.New(fault.State, "%s is open for writing", d.Path)
		}
		if err = errors.Join(err, d.is(f)); err != nil {
			f.Close()
			return err
		}
		file = f
		return nil
	})
	return file, err
}

// Unplug takes a disk from the guest, and waits until it has let go of it. One that is not there is fine.
func (c *Client) Unplug(ctx context.Context, name string) error {
	there, err := c.Plugged(ctx, name)
	if err != nil {
		return err
	}
	if there {
		events, stop := c.Events()
		defer stop()
		if err := c.Run(ctx, "device_del", map[string]any{"id": name}, nil); err != nil {
			return err
		}
		if err := c.deleted(ctx, events, name); err != nil {
			return err
		}
	}
	return c.removeNode(ctx, name)
}

// deleted waits until the guest has released a disk.
func (c *Client) deleted(ctx context.Context, events <-chan Event, name string) error {
	again := time.NewTicker(500 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case e := <-events:
			var d struct{ Device string }
			if e.Name == "DEVICE_DELETED" && json.Unmarshal(e.Data, &d) == nil && d.Device == name {
				return nil
			}
		case <-again.C: // an event may have been lost
			if there, err := c.Plugged(ctx, name); err != nil || !there {
				return err
			}
		case <-c.Gone():
			return ErrGone
		case <-ctx.Done():
			return fault.New(fault.State, "the guest does not let go of the disk %s: %w", name, ctx.Err())
		}
	}
}
