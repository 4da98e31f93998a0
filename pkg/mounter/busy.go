package mounter

import (
	"errors"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Busy reports whether a file system on the device is mounted in any mount namespace, or
// another program holds the device: it tries an O_EXCL open.
func Busy(device string) (bool, error) {
	f, err := exclusively(device, func(linux.Statx) error { return nil })
	if errors.Is(err, linux.EBUSY) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return false, f.Close()
}
