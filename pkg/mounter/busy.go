package mounter

import (
	"errors"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Busy reports whether a file system on the device is mounted in any mount namespace, or
// another program holds the device: it tries an O_EXCL open.
func Busy(device string) (bool, error) {
	err := linux.Settle(func() error {
		f, err := linux.OpenBlock(device, os.O_RDONLY|linux.OExcl)
		if err != nil {
			return err
		}
		return f.Close()
	})
	if errors.Is(err, linux.EBUSY) {
		return true, nil
	}
	return false, err
}
