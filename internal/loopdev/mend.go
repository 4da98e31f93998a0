package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// changes lists how a held device differs from what the driver left: a pod with a loop device's
// node can change these. loop is the device.
func (d Device) changes(loop *os.File) []string {
	if !d.Held {
		return nil
	}
	var changed []string
	say := func(is bool, format string, args ...any) {
		if is {
			changed = append(changed, fmt.Sprintf(format, args...))
		}
	}
	say(d.now.Device != d.backing.dev || d.now.Inode != d.backing.ino, "it shows another file")
	say(d.now.Offset != d.hold.offset || d.now.Limit != d.hold.limit, "it shows another part of its file: offset %d, limit %d",
		d.now.Offset, d.now.Limit)
	say((d.now.Flags^d.hold.flags)&linux.LoopAutoclear != 0, "it was to be unbound at its last close")
	say((d.now.Flags^d.hold.flags)&linux.LoopPartscan != 0, "the kernel was told to look for partitions on it")
	if sector, err := linux.SectorSize(loop); err == nil {
		say(sector != d.hold.sector, "it has sectors of %d bytes instead of %d", sector, d.hold.sector)
	}
	return changed
}

// Restore restores a held device to its state when it was held, and lists what was changed. path is
// its file. A change that cannot be undone is a fault State.
func (n Nodes) Restore(d Device, path string) (changed []string, err error) {
	if !d.Held {
		return nil, nil
	}
	loop, err := linux.Open(d.Path, os.O_RDWR)
	if d.gone(err) {
		return nil, nil // it is being detached
	}
	if err != nil {
		return nil, err
	}
	defer loop.Close()
	if d.now, err = linux.LoopStatus(loop); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path, err)
	}
	if changed = d.changes(loop); len(changed) == 0 {
		return nil, nil
	}
	defer mending.Lock(d.number())()
	if held, err := n.stillHeld(d); err != nil || !held {
		return nil, err // it is being detached, or cannot be queried
	}
	if d.now.Device != d.backing.dev || d.now.Inode != d.backing.ino {
		// Only a read-only device can be changed this way.
		f, err := linux.Open(path, os.O_RDONLY)
		if errors.Is(err, linux.ENOENT) {
			return changed, fault.New(fault.State, "%s shows another file, and its own is gone: %w; unpublish it", d.Path, err)
		}
		if err != nil {
			return changed, err
		}
		is, err := identify(f)
		if err == nil && is != d.backing {
			err = fmt.Errorf("%s is another file now", path)
		}
		if err == nil {
			err = d.show(loop, path) // it accepts a file of the size that it shows
		}
		if err == nil {
			err = linux.LoopChangeFD(loop, f)
		}
		f.Close()
		if err != nil {
			return changed, fault.New(fault.State, "%s shows another file, and cannot be set back: %w; unpublish it", d.Path, err)
		}
	}
	if err := d.show(loop, path); err != nil {
		return changed, fault.New(fault.State, "%s was changed, and cannot be set back: %w", d.Path, err)
	}
	if err := linux.LoopSetCapacity(loop); err != nil {
		return changed, fmt.Errorf("%s: %w", d.Path, err)
	}
	if sector, err := linux.SectorSize(loop); err != nil || sector != d.hold.sector {
		if err == nil {
			err = linux.LoopSetBlockSize(loop, d.hold.sector)
		}
		if err != nil {
			return changed, fault.New(fault.State, "%s has sectors of %d bytes, and cannot be set back to %d: %w", d.Path, sector,
				d.hold.sector, err)
		}
	}
	// Refused if the pool's file system does not support it: then the device had none before.
	if err := linux.LoopSetDirectIO(loop); err != nil && !errors.Is(err, linux.EINVAL) {
		return changed, fmt.Errorf("%s: %w", d.Path, err)
	}
	if d.hold.flags&linux.LoopPartscan != 0 {
		return changed, nil
	}
	return changed, d.deletePartitions(loop)
}

func (d Device) show(loop *os.File, path string) error {
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		err := linux.LoopShow(loop, d.hold.offset, d.hold.limit, d.hold.flags&linux.LoopAutoclear != 0, filepath.Base(path))
		if !errors.Is(err, linux.EAGAIN) || time.Since(begin) > patience {
			return err
		}
	}
}

// deletePartitions removes devices that the kernel made from a partition table written by the pod.
// Partition scanning (LO_FLAGS_PARTSCAN) cannot be turned off while the device is bound.
func (d Device) deletePartitions(loop *os.File) error {
	name := filepath.Base(d.Path)
	dir, err := os.ReadDir("/sys/block/" + name)
	if err != nil {
		return err
	}
	for _, e := range dir {
		number := 0
		if rest, ok := strings.CutPrefix(e.Name(), name+"p"); ok {
			if _, err := fmt.Sscanf(rest, "%d", &number); err != nil {
				continue
			}
		}
		if number == 0 {
			continue
		}
		if err := linux.DeletePartition(loop, number); err != nil && !errors.Is(err, linux.ENXIO) {
			return fault.New(fault.State, "%s: its partition %d was made by a pod and cannot be taken away: %w", d.Path, number, err)
		}
	}
	return nil
}
