package mounter

import (
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Hold keeps a device for the caller until the file is closed, at the latest when the process ends: for a device that is attached and not
// mounted yet, which nobody has open otherwise. It opens the device for reading with O_EXCL (open(2)). [Busy] is true then, and the kernel
// refuses to mount the device, also for this process, so close the file before [Open]. Ordinary opens still work, as those of hypervisors
// and of pods with a raw block volume. Programs that write without O_EXCL are not kept out.
//
// A device that is in use is a fault State with EBUSY in its chain. A path that leads to no device, or to another one than the numbers
// say, is a fault State as well, and that device is not touched.
func Hold(d Device) (*os.File, error) {
	if d.Major == 0 {
		return nil, fault.New(fault.Invalid, "device %q has no numbers to know it by", d.Path)
	}
	f, err := exclusively(d.Path, func(st linux.Statx) error { return d.other(Device{Major: st.RdevMajor, Minor: st.RdevMinor}) })
	switch {
	case errors.Is(err, linux.EBUSY):
		return nil, fault.New(fault.State, "%s is in use%s: %w", d.Path, HeldBy(d).After("; "), err)
	case fault.Is(err, fault.State):
		return nil, fmt.Errorf("%s: %w", d.Path, err)
	case err != nil:
		return nil, noDevice(d.Path, err)
	}
	return f, nil
}

// exclusively opens a device with O_EXCL. Whoever had it may have ended just now.
func exclusively(device string, allowed func(linux.Statx) error) (f *os.File, err error) {
	err = linux.Settle(func() (err error) {
		f, err = linux.OpenBlockIf(device, os.O_RDONLY|linux.OExcl, allowed)
		return err
	})
	return f, err
}
