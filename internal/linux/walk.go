package linux

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Dir is a directory that a walk over a whole volume holds open. Its calls take names as
// getdents64(2) returns them, so that a walk over a million files makes no garbage.
type Dir struct{ fd int }

// Name is a directory entry's name, with its closing zero byte.
type Name []byte

// String is the name without the zero byte.
func (n Name) String() string { return unix.ByteSliceToString(n) }

// Inode holds the fields of statx(2) that a walk needs.
type Inode struct {
	Mode      uint16 // type and permission bits
	UID, GID  uint32
	Links     uint32
	Dev, Ino  uint64
	MountRoot bool // another file system is mounted there
	Fixed     bool // immutable or append-only, chattr(1): it cannot be changed
}

// IsDir and IsSymlink report the kind of file.
func (i Inode) IsDir() bool     { return i.Mode&unix.S_IFMT == unix.S_IFDIR }
func (i Inode) IsSymlink() bool { return i.Mode&unix.S_IFMT == unix.S_IFLNK }

// Mode bits that a walk needs.
const (
	ModeSetuid = unix.S_ISUID
	ModeSetgid = unix.S_ISGID
)

// OpenRootDir reopens the directory that f is on.
func OpenRootDir(f *os.File) (Dir, error) {
	defer runtime.KeepAlive(f)
	return Dir{fdOf(f)}.Open(Name(".\x00"))
}

// Open opens the directory called name in d; a symbolic link is ENOTDIR.
func (d Dir) Open(name Name) (Dir, error) {
	var fd uintptr
	err := call("openat", func() error {
		var e unix.Errno
		fd, _, e = unix.Syscall6(unix.SYS_OPENAT, uintptr(d.fd), uintptr(unsafe.Pointer(&name[0])),
			unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0, 0, 0)
		return errnoErr(e)
	})
	return Dir{int(fd)}, err
}

// Close is close(2).
func (d Dir) Close() error { return os.NewSyscallError("close", unix.Close(d.fd)) }

// Read fills buf with entries, getdents64(2); n is 0 at the end.
func (d Dir) Read(buf []byte) (n int, err error) {
	err = call("getdents64", func() error { n, err = unix.Getdents(d.fd, buf); return err })
	return n, err
}

// NextEntry returns the first entry in the result of Read, and the rest.
func NextEntry(buf []byte) (name Name, rest []byte) {
	const nameAt = 19
	length := int(*(*uint16)(unsafe.Pointer(&buf[16])))
	return Name(buf[nameAt:length]), buf[length:]
}

// Stat is statx(2) of name in d; it does not follow a link.
func (d Dir) Stat(name Name) (Inode, error) { return d.stat(name, unix.AT_SYMLINK_NOFOLLOW) }

// Self is statx(2) of the directory.
func (d Dir) Self() (Inode, error) { return d.stat(Name("\x00"), unix.AT_EMPTY_PATH) }

func (d Dir) stat(name Name, flags int) (Inode, error) {
	var st unix.Statx_t
	for {
		_, _, e := unix.Syscall6(unix.SYS_STATX, uintptr(d.fd), uintptr(unsafe.Pointer(&name[0])),
			uintptr(flags|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT),
			unix.STATX_TYPE|unix.STATX_MODE|unix.STATX_UID|unix.STATX_GID|unix.STATX_NLINK|unix.STATX_INO, uintptr(unsafe.Pointer(&st)), 0)
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return Inode{}, os.NewSyscallError("statx", e)
		}
		return Inode{
			Mode: st.Mode, UID: st.Uid, GID: st.Gid, Links: st.Nlink,
			Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino,
			MountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
			Fixed:     st.Attributes&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) != 0,
		}, nil
	}
}

// Chgrp is fchownat(2) of name in d: it sets the group, without following a link.
func (d Dir) Chgrp(name Name, gid uint32) error {
	return call("fchownat", func() error {
		_, _, e := unix.Syscall6(unix.SYS_FCHOWNAT, uintptr(d.fd), uintptr(unsafe.Pointer(&name[0])),
			^uintptr(0), uintptr(gid), unix.AT_SYMLINK_NOFOLLOW, 0)
		return errnoErr(e)
	})
}

// Chmod changes the permission bits of name in d, which must not be a symbolic link: fchmodat2(2)
// (Linux 6.6), or through a descriptor of that very file if the kernel lacks the call.
func (d Dir) Chmod(name Name, mode uint32) error {
	err := call("fchmodat2", func() error {
		_, _, e := unix.Syscall6(unix.SYS_FCHMODAT2, uintptr(d.fd), uintptr(unsafe.Pointer(&name[0])),
			uintptr(mode), unix.AT_SYMLINK_NOFOLLOW, 0, 0)
		return errnoErr(e)
	})
	if !errors.Is(err, unix.ENOSYS) {
		return err
	}
	f, i, err := d.hold(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if i.IsSymlink() {
		return os.NewSyscallError("chmod", unix.EOPNOTSUPP)
	}
	return chmodHeld(f, mode)
}

// hold opens name in d itself, only to hold it.
func (d Dir) hold(name Name) (*os.File, Inode, error) {
	f, err := open("openat", name.String(), func() (int, error) {
		return unix.Openat(d.fd, name.String(), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, Inode{}, err
	}
	i, err := Dir{fdOf(f)}.Self()
	if err != nil {
		f.Close()
	}
	return f, i, err
}

func chmodHeld(f *os.File, mode uint32) error {
	return call("chmod", func() error { return unix.Chmod("/proc/self/fd/"+strconv.Itoa(fdOf(f)), mode) })
}

// ChangeExactly is Chgrp and Chmod of the very file that Stat returned. It is for setuid and setgid
// programs: in a volume in use, a name may lead to another file by now, which must not get such a
// mode. Then changed is false.
func (d Dir) ChangeExactly(name Name, told Inode, gid, mode uint32) (changed bool, err error) {
	f, now, err := d.hold(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if now != told {
		return false, nil
	}
	err = call("fchownat", func() error { return unix.Fchownat(fdOf(f), "", -1, int(gid), unix.AT_EMPTY_PATH) })
	if err != nil {
		return false, err
	}
	return true, chmodHeld(f, mode)
}

// ChgrpSelf changes the directory's group.
func (d Dir) ChgrpSelf(gid uint32) error {
	return call("fchown", func() error { return unix.Fchown(d.fd, -1, int(gid)) })
}

// ChmodSelf changes the directory's permission bits.
func (d Dir) ChmodSelf(mode uint32) error {
	return call("fchmod", func() error { return unix.Fchmod(d.fd, mode) })
}

// Getxattr is fgetxattr(2); nil if there is none.
func (d Dir) Getxattr(name string) ([]byte, error) {
	buf := make([]byte, 4096)
	var n int
	err := call("fgetxattr", func() (e error) { n, e = unix.Fgetxattr(d.fd, name, buf); return e })
	if errors.Is(err, unix.ENODATA) {
		return nil, nil
	}
	return buf[:max(n, 0)], err
}

// Setxattr is fsetxattr(2).
func (d Dir) Setxattr(name string, value []byte) error {
	return call("fsetxattr", func() error { return unix.Fsetxattr(d.fd, name, value, 0) })
}

// Removexattr is fremovexattr(2); a missing attribute is no error.
func (d Dir) Removexattr(name string) error {
	err := call("fremovexattr", func() error { return unix.Fremovexattr(d.fd, name) })
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	return err
}
