// Package guestdisks finds the SCSI disks of the microVM that it runs in, by their serial numbers. The host chose these when it plugged
// the disks in.
package guestdisks

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// seen holds the serials of disks that were already read: a machine may have many disks, and waits
// for one of them.
var seen struct {
	sync.Mutex
	serials map[disk]string
}

// disk identifies a disk while it is plugged in: a later disk with the same name has another inode
// in sysfs.
type disk struct {
	name string
	ino  uint64
}

// All returns the serial of every SCSI disk, by kernel name. Disks that are not ready or are
// being unplugged are left out.
func All() (map[string]string, error) {
	blocks, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	found := make(map[string]string, len(blocks))
	kept := make(map[disk]string, len(blocks))
	seen.Lock()
	defer seen.Unlock()
	for _, b := range blocks {
		if !strings.HasPrefix(b.Name(), "sd") {
			continue
		}
		dir := "/sys/block/" + b.Name()
		st, err := linux.StatxPath(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue // just unplugged
		}
		if err != nil {
			return nil, err
		}
		d := disk{b.Name(), st.Ino}
		serial, ok := seen.serials[d]
		if !ok {
			const header = 4
			page, err := os.ReadFile(dir + "/device/vpd_pg80")
			if linux.Short(err) {
				return nil, err
			}
			if err != nil || len(page) <= header {
				continue // not ready yet
			}
			serial = string(bytes.Trim(page[header:], "\x00 "))
		}
		found[b.Name()], kept[d] = serial, serial
	}
	seen.serials = kept
	return found, nil
}

// Find waits for the disk with the given serial.
func Find(ctx context.Context, serial string) (mounter.Device, error) {
	for {
		all, err := All()
		if err != nil {
			return mounter.Device{}, err
		}
		for name, have := range all {
			if have == serial {
				d, err := mounter.FindDevice("/dev/" + name)
				if err == nil {
					return d, nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return mounter.Device{}, fault.New(fault.State, "no disk with the serial %q has appeared in the guest: %w", serial, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}
