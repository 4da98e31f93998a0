package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Alone reports whether nobody but f, which is open for reading or for writing, has its file open: no process (one that runs it as a
// program counts) and no loop device, by whatever name or mount. The kernel gives a write lease only then (fcntl(2), F_SETLEASE; Linux 5.3
// counts exactly). Alone returns the lease at once; whoever opens the file meanwhile waits until then. An error means "cannot tell":
// EINVAL if the file system has no leases, EACCES if the file is another user's.
func Alone(f *os.File) (bool, error) {
	err := lease(f, unix.F_WRLCK)
	if err == nil {
		return true, lease(f, unix.F_UNLCK)
	}
	if errors.Is(err, unix.EAGAIN) {
		return false, nil
	}
	return false, err
}

func lease(f *os.File, kind int) error {
	return call("F_SETLEASE", func() error {
		_, err := unix.FcntlInt(uintptr(fdOf(f)), unix.F_SETLEASE, kind)
		return err
	})
}
