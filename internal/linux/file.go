package linux

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Flags for path resolution, openat2(2).
const (
	ResolveBeneath    = unix.RESOLVE_BENEATH
	ResolveNoSymlinks = unix.RESOLVE_NO_SYMLINKS
	ResolveNoMagic    = unix.RESOLVE_NO_MAGICLINKS
	ResolveNoXdev     = unix.RESOLVE_NO_XDEV

	OPath      = unix.O_PATH
	ODirectory = unix.O_DIRECTORY
	ONofollow  = unix.O_NOFOLLOW
	OExcl      = unix.O_EXCL
)

// Openat2 is openat2(2) (Linux 5.6) relative to dir, close-on-exec.
func Openat2(dir *os.File, path string, flags int, resolve uint64) (*os.File, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: resolve}
	for range 128 {
		f, err := open("openat2", path, func() (int, error) { return unix.Openat2(fdOf(dir), path, &how) })
		// EAGAIN: a rename elsewhere raced with a RESOLVE_BENEATH look-up.
		if !errors.Is(err, unix.EAGAIN) {
			return f, err
		}
	}
	return nil, &os.PathError{Op: "openat2", Path: path, Err: unix.EAGAIN}
}

// Open is open(2), close-on-exec. Unlike os.Open it does not register the file with the poller,
// which costs four more calls.
func Open(path string, flags int) (*os.File, error) {
	return open("open", path, func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC, 0) })
}

// OpenBlock opens a block device, and no other kind of file: to open a FIFO waits, and to open some devices does something. Another kind is
// ENOTBLK.
func OpenBlock(path string, flags int) (*os.File, error) {
	return OpenBlockIf(path, flags, func(Statx) error { return nil })
}

// OpenBlockIf is OpenBlock for a device that allowed accepts. Another one is not opened.
func OpenBlockIf(path string, flags int, allowed func(Statx) error) (*os.File, error) {
	at, err := Open(path, OPath)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	st, err := StatxFile(at)
	if err == nil && !st.IsBlock() {
		err = &os.PathError{Op: "open", Path: path, Err: ENOTBLK}
	}
	if err == nil {
		err = allowed(st)
	}
	if err != nil {
		return nil, err
	}
	through := "/proc/self/fd/" + strconv.Itoa(fdOf(at))
	return open("open", path, func() (int, error) { return unix.Open(through, flags|unix.O_CLOEXEC, 0) })
}

// ReadSmall returns the first 4 KiB of a file, enough for sysfs.
func ReadSmall(path string) (string, error) {
	f, err := Open(path, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var n int
	buf := make([]byte, 4096)
	err = call("read", func() (e error) { n, e = unix.Read(fdOf(f), buf); return e })
	return string(buf[:max(n, 0)]), err
}

// Openat is openat(2) of one name in dir, close-on-exec.
func Openat(dir *os.File, name string, flags int, mode uint32) (*os.File, error) {
	return open("openat", name, func() (int, error) { return unix.Openat(fdOf(dir), name, flags|unix.O_CLOEXEC, mode) })
}

// Mkdirat is mkdirat(2).
func Mkdirat(dir *os.File, name string, mode uint32) error {
	return call("mkdirat", func() error { return unix.Mkdirat(fdOf(dir), name, mode) })
}

// Fchmod is fchmod(2). The mode has the set-group-ID bit where the kernel has it, unlike an os.FileMode.
func Fchmod(f *os.File, mode uint32) error {
	return call("fchmod", func() error { return unix.Fchmod(fdOf(f), mode) })
}

// Rmdirat is unlinkat(2) with AT_REMOVEDIR: it removes an empty directory that is not a mount
// point.
func Rmdirat(dir *os.File, name string) error {
	return call("unlinkat", func() error { return unix.Unlinkat(fdOf(dir), name, unix.AT_REMOVEDIR) })
}

// Unlinkat is unlinkat(2) of a file.
func Unlinkat(dir *os.File, name string) error {
	return call("unlinkat", func() error { return unix.Unlinkat(fdOf(dir), name, 0) })
}

// Statx holds the fields of statx(2) that mounts need.
type Statx struct {
	Mode                 uint16
	UID, GID             uint32
	Size                 uint64
	Allocated            int64 // allocated bytes
	Ino                  uint64
	DevMajor, DevMinor   uint32
	RdevMajor, RdevMinor uint32
	MountRoot            bool // it is the root of a mount
	MountID              uint64
	MountIDUnique        bool
}

// Directory is the mode of a directory.
const Directory = unix.S_IFDIR

// IsDir, IsRegular, IsSymlink and IsBlock report the kind of file.
func (s Statx) IsDir() bool     { return s.Mode&unix.S_IFMT == unix.S_IFDIR }
func (s Statx) IsRegular() bool { return s.Mode&unix.S_IFMT == unix.S_IFREG }
func (s Statx) IsSymlink() bool { return s.Mode&unix.S_IFMT == unix.S_IFLNK }
func (s Statx) IsBlock() bool   { return s.Mode&unix.S_IFMT == unix.S_IFBLK }

// StatxFile is statx(2) with AT_EMPTY_PATH, of the file that f is open on.
func StatxFile(f *os.File) (Statx, error) { return statx(f, "", unix.AT_EMPTY_PATH) }

// StatxPath is statx(2) of a path, following symbolic links.
func StatxPath(path string) (Statx, error) { return statx(CWD, path, 0) }

func statx(dir *os.File, name string, flags int) (Statx, error) {
	const statxMntIDUnique = 0x4000 // STATX_MNT_ID_UNIQUE, Linux 6.8
	var st unix.Statx_t
	err := call("statx", func() error {
		return unix.Statx(fdOf(dir), name, flags|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID|statxMntIDUnique, &st)
	})
	if err != nil {
		return Statx{}, err
	}
	return Statx{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid, Size: st.Size, Allocated: int64(st.Blocks) * 512, Ino: st.Ino,
		DevMajor: st.Dev_major, DevMinor: st.Dev_minor,
		RdevMajor: st.Rdev_major, RdevMinor: st.Rdev_minor,
		MountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		MountID:   st.Mnt_id, MountIDUnique: st.Mask&statxMntIDUnique != 0,
	}, nil
}

// Statfs holds the fields of fstatfs(2).
type Statfs struct {
	Blocks, Free, Available uint64 // in units of BlockSize
	BlockSize               uint64 // bytes
	Inodes, InodesFree      uint64
	Flags                   int64
	Type                    int64
}

// Flags of Statfs, statfs(2).
const (
	StRdonly     = unix.ST_RDONLY
	StNosuid     = unix.ST_NOSUID
	StNodev      = unix.ST_NODEV
	StNoexec     = unix.ST_NOEXEC
	StNoatime    = unix.ST_NOATIME
	StNodiratime = unix.ST_NODIRATIME
	StRelatime   = unix.ST_RELATIME

	StNosymfollow = 0x2000 // since Linux 5.10; golang.org/x/sys lacks it
)

// Values of Statfs.Type.
const (
	Cgroup2 = unix.CGROUP2_SUPER_MAGIC // cgroups, version 2
	Tmpfs   = unix.TMPFS_MAGIC
)

// Fstatfs is fstatfs(2).
func Fstatfs(f *os.File) (Statfs, error) {
	var st unix.Statfs_t
	if err := call("fstatfs", func() error { return unix.Fstatfs(fdOf(f), &st) }); err != nil {
		return Statfs{}, err
	}
	return Statfs{
		Blocks: st.Blocks, Free: st.Bfree, Available: st.Bavail, BlockSize: uint64(st.Frsize),
		Inodes: st.Files, InodesFree: st.Ffree, Flags: st.Flags, Type: st.Type,
	}, nil
}

// AccessWrite is faccessat(2) with AT_EACCESS: it checks write access to path.
func AccessWrite(path string) error {
	return call("faccessat", func() error { return unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS) })
}

// DirEmpty reports whether the directory has no entry, with one getdents64(2).
func DirEmpty(dir *os.File) (bool, error) {
	f, err := Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	names, err := f.Readdirnames(1)
	if len(names) > 0 {
		return false, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) && err.Error() != "EOF" {
		return false, err
	}
	return true, nil
}

// Flock is flock(2) with LOCK_EX|LOCK_NB; EAGAIN if another process holds the lock.
func Flock(f *os.File) error {
	return call("flock", func() error { return unix.Flock(fdOf(f), unix.LOCK_EX|unix.LOCK_NB) })
}

// FlockWithin is Flock that waits for another holder until ctx ends.
func FlockWithin(ctx context.Context, f *os.File) error {
	for {
		err := Flock(f)
		if !errors.Is(err, EAGAIN) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Fallocate is fallocate(2) with FALLOC_FL_KEEP_SIZE: it reserves length bytes of f from off, even
// beyond its end, without changing its length.
func Fallocate(f *os.File, off, length int64) error {
	return call("fallocate", func() error { return unix.Fallocate(fdOf(f), unix.FALLOC_FL_KEEP_SIZE, off, length) })
}

// PunchHole is fallocate(2) with FALLOC_FL_PUNCH_HOLE: it frees the space of length bytes of f from
// off.
func PunchHole(f *os.File, off, length int64) error {
	return call("fallocate", func() error {
		return unix.Fallocate(fdOf(f), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
	})
}

// Syncfs is syncfs(2): it writes f's file system to its device. The error may be that of an earlier
// failed write (Linux 5.8).
func Syncfs(f *os.File) error { return call("syncfs", func() error { return unix.Syncfs(fdOf(f)) }) }

// SeekData is lseek(2) with SEEK_DATA, then SEEK_HOLE: it finds the next run of data at or after
// off. done is true if there is none.
func SeekData(f *os.File, off int64) (start, end int64, done bool, err error) {
	err = call("lseek", func() (e error) { start, e = unix.Seek(fdOf(f), off, unix.SEEK_DATA); return e })
	if errors.Is(err, unix.ENXIO) {
		return 0, 0, true, nil
	}
	if err != nil {
		return 0, 0, false, err
	}
	err = call("lseek", func() (e error) { end, e = unix.Seek(fdOf(f), start, unix.SEEK_HOLE); return e })
	return start, end, false, err
}

// Ficlone is ioctl FICLONE: dst shares the extents of src.
func Ficlone(dst, src *os.File) error {
	return call("ficlone", func() error { return unix.IoctlFileClone(fdOf(dst), fdOf(src)) })
}

// MakeFile makes an empty regular file, mode 0644, with mknod(2), which never opens it.
func MakeFile(path string) error {
	return call("mknod", func() error { return unix.Mknod(path, unix.S_IFREG|0o644, 0) })
}

// Mknod makes a block device node, mode 0600.
func Mknod(path string, major, minor uint32) error {
	return call("mknod", func() error {
		return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor)))
	})
}

// Uname returns the kernel's release, uname(2).
func Uname() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// CapSysResource is the capability that online growth of ext4 needs.
const CapSysResource = unix.CAP_SYS_RESOURCE

// HasCapability reports whether this process holds the capability now.
func HasCapability(c int) (bool, error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := call("capget", func() error { return unix.Capget(&hdr, &data[0]) }); err != nil {
		return false, err
	}
	return data[c/32].Effective&(1<<(c%32)) != 0, nil
}

// KilledWithThread makes a child end with SIGKILL when the thread that started it ends, prctl(2)
// PR_SET_PDEATHSIG.
func KilledWithThread() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// LoadModule is finit_module(2) of a kernel module's file, compressed or not; an already loaded
// module is no error.
func LoadModule(path string) error {
	f, err := Open(path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(path, ".ko") {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	err = call("finit_module", func() error { return unix.FinitModule(fdOf(f), "", flags) })
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// Memfd is memfd_create(2): a file in memory that lasts while it is open.
func Memfd(name string) (*os.File, error) {
	return open("memfd_create", name, func() (int, error) { return unix.MemfdCreate(name, unix.MFD_CLOEXEC) })
}

// BoundedMemfd is Memfd for a file of a fixed size: a write beyond it is EPERM, fcntl(2) F_SEAL_GROW.
func BoundedMemfd(name string, size int64) (*os.File, error) {
	f, err := open("memfd_create", name, func() (int, error) { return unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING) })
	if err != nil {
		return nil, err
	}
	err = call("ftruncate", func() error { return unix.Ftruncate(fdOf(f), size) })
	if err == nil {
		err = call("fcntl", func() error {
			_, e := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
			return e
		})
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// TempFile is open(2) with O_TMPFILE: an unnamed file in dir, size bytes long, that disappears when
// it is closed.
func TempFile(dir string, size int64) (*os.File, error) {
	f, err := open("open", dir, func() (int, error) { return unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600) })
	if err != nil {
		return nil, err
	}
	if err := call("ftruncate", func() error { return unix.Ftruncate(fdOf(f), size) }); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
