package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// The errnos on which other packages make decisions.
const (
	EACCES          = unix.EACCES
	EADDRNOTAVAIL   = unix.EADDRNOTAVAIL
	EHOSTUNREACH    = unix.EHOSTUNREACH
	ENETUNREACH     = unix.ENETUNREACH
	EPROTONOSUPPORT = unix.EPROTONOSUPPORT
	ETIMEDOUT       = unix.ETIMEDOUT
	EBADMSG         = unix.EBADMSG // EFSBADCRC
	EBUSY           = unix.EBUSY
	EAGAIN          = unix.EAGAIN
	EEXIST          = unix.EEXIST
	EADDRINUSE      = unix.EADDRINUSE
	ECONNREFUSED    = unix.ECONNREFUSED
	ECONNRESET      = unix.ECONNRESET
	EFBIG           = unix.EFBIG
	EINVAL          = unix.EINVAL
	ESRCH           = unix.ESRCH
	EIO             = unix.EIO
	ELOOP           = unix.ELOOP
	EMFILE          = unix.EMFILE
	ENFILE          = unix.ENFILE
	ENODEV          = unix.ENODEV
	ENOMEM          = unix.ENOMEM
	ENOENT          = unix.ENOENT
	ENOSPC          = unix.ENOSPC
	EDQUOT          = unix.EDQUOT
	ENOSYS          = unix.ENOSYS
	ENOTBLK         = unix.ENOTBLK
	ENOTDIR         = unix.ENOTDIR
	ENOTEMPTY       = unix.ENOTEMPTY
	ENOTTY          = unix.ENOTTY
	ENXIO           = unix.ENXIO
	EOPNOTSUPP      = unix.EOPNOTSUPP
	EPERM           = unix.EPERM
	EROFS           = unix.EROFS
	EUCLEAN         = unix.EUCLEAN // EFSCORRUPTED
	EXDEV           = unix.EXDEV
)

// call runs f until it is not interrupted, and adds the call's name to the error.
func call(name string, f func() error) error {
	for {
		err := f()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError(name, err)
		}
		return nil
	}
}

func open(name, path string, f func() (int, error)) (*os.File, error) {
	for {
		fd, err := f()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: name, Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}

// CWD is the working directory (AT_FDCWD), from which an absolute path is opened.
var CWD = new(os.File)

// fdOf returns the descriptor of a file. A nil file gives an invalid descriptor (EBADF), never the
// working directory: an operation on a volume would hit the node's own disk.
func fdOf(f *os.File) int {
	switch f {
	case CWD:
		return unix.AT_FDCWD
	case nil:
		return -1
	}
	return int(f.Fd())
}

// SIGTERM asks a process to end.
const SIGTERM = unix.SIGTERM

// SIGHUP asks a daemon to reread its configuration.
const SIGHUP = unix.SIGHUP
