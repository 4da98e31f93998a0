package linux

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mount attributes, mount_setattr(2).
const (
	MountAttrRdonly      = unix.MOUNT_ATTR_RDONLY
	MountAttrNosuid      = unix.MOUNT_ATTR_NOSUID
	MountAttrNodev       = unix.MOUNT_ATTR_NODEV
	MountAttrNoexec      = unix.MOUNT_ATTR_NOEXEC
	MountAttrAtimeMask   = unix.MOUNT_ATTR__ATIME
	MountAttrRelatime    = unix.MOUNT_ATTR_RELATIME
	MountAttrNoatime     = unix.MOUNT_ATTR_NOATIME
	MountAttrStrictatime = unix.MOUNT_ATTR_STRICTATIME
	MountAttrNodiratime  = unix.MOUNT_ATTR_NODIRATIME
	MountAttrNosymfollow = unix.MOUNT_ATTR_NOSYMFOLLOW
	MountAttrIdmap       = unix.MOUNT_ATTR_IDMAP
)

// Propagation of mounts, mount_namespaces(7).
const (
	PropagationPrivate = unix.MS_PRIVATE
	PropagationSlave   = unix.MS_SLAVE
	PropagationShared  = unix.MS_SHARED
)

// Fsopen is fsopen(2): a new file system context.
func Fsopen(fstype string) (*os.File, error) {
	return open("fsopen", fstype, func() (int, error) { return unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC) })
}

// FsconfigString is fsconfig(2) with FSCONFIG_SET_STRING.
func FsconfigString(fs *os.File, key, value string) error {
	return call("fsconfig", func() error { return unix.FsconfigSetString(fdOf(fs), key, value) })
}

// FsconfigFlag is fsconfig(2) with FSCONFIG_SET_FLAG.
func FsconfigFlag(fs *os.File, key string) error {
	return call("fsconfig", func() error { return unix.FsconfigSetFlag(fdOf(fs), key) })
}

// FsconfigCreate is fsconfig(2) with FSCONFIG_CMD_CREATE: it creates a superblock, or shares a live
// one.
func FsconfigCreate(fs *os.File) error {
	return call("fsconfig", func() error { return unix.FsconfigCreate(fdOf(fs)) })
}

// FsconfigReconfigure is fsconfig(2) with FSCONFIG_CMD_RECONFIGURE: the options that were set since Fsmount apply to the superblock.
func FsconfigReconfigure(fs *os.File) error {
	return call("fsconfig reconfigure", func() error { return unix.FsconfigReconfigure(fdOf(fs)) })
}

// FsContextLog reads the kernel's messages from a file system context, without their level letters,
// joined by "; ". It is empty if there are none.
func FsContextLog(fs *os.File) string {
	var lines []string
	buf := make([]byte, 1024)
	for len(lines) < 16 {
		n, err := unix.Read(fdOf(fs), buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		line := strings.TrimSpace(string(buf[:n]))
		if len(line) > 2 && line[1] == ' ' {
			line = line[2:]
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "; ")
}

// Fsmount is fsmount(2): it returns a detached mount of the context's superblock.
func Fsmount(fs *os.File, attrs int) (*os.File, error) {
	return open("fsmount", fs.Name(), func() (int, error) { return unix.Fsmount(fdOf(fs), unix.FSMOUNT_CLOEXEC, attrs) })
}

// MountAttr holds the changes for mount_setattr(2) and open_tree_attr(2).
type MountAttr struct {
	Set, Clear  uint64
	Propagation uint64   // one of the constants above; 0 leaves it
	Userns      *os.File // with MountAttrIdmap in Set: the user namespace whose map is used
}

func (a MountAttr) raw() unix.MountAttr {
	m := unix.MountAttr{Attr_set: a.Set, Attr_clr: a.Clear, Propagation: a.Propagation}
	if a.Userns != nil {
		m.Userns_fd = uint64(fdOf(a.Userns))
	}
	return m
}

// OpenTreeAttr is open_tree_attr(2) (Linux 6.15) with OPEN_TREE_CLONE: it returns a detached bind
// mount of f with other attributes. ENOSYS if the kernel lacks the call.
func OpenTreeAttr(f *os.File, a MountAttr) (*os.File, error) {
	attr := a.raw()
	empty := [1]byte{}
	const flags = unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH
	return open("open_tree_attr", f.Name(), func() (int, error) {
		fd, _, e := unix.Syscall6(unix.SYS_OPEN_TREE_ATTR, uintptr(fdOf(f)), uintptr(unsafe.Pointer(&empty[0])), flags,
			uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
		runtime.KeepAlive(a.Userns)
		return int(fd), errnoErr(e)
	})
}

// OpenTreeClone is open_tree(2) with OPEN_TREE_CLONE: it returns a detached bind mount of f.
func OpenTreeClone(f *os.File) (*os.File, error) {
	return open("open_tree", f.Name(), func() (int, error) {
		return unix.OpenTree(fdOf(f), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	})
}

// OpenTreeCloneRecursive is OpenTreeClone with AT_RECURSIVE: submounts too.
func OpenTreeCloneRecursive(f *os.File) (*os.File, error) {
	return open("open_tree", f.Name(), func() (int, error) {
		return unix.OpenTree(fdOf(f), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	})
}

// MoveMount is move_mount(2): it attaches the detached mount to the directory or file that target
// is open on.
func MoveMount(mount, target *os.File) error {
	return call("move_mount", func() error {
		return unix.MoveMount(fdOf(mount), "", fdOf(target), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	})
}

// MountSetattr is mount_setattr(2) on the mount that f is on.
func MountSetattr(f *os.File, a MountAttr, recursive bool) error {
	attr := a.raw()
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	err := call("mount_setattr", func() error { return unix.MountSetattr(fdOf(f), "", flags, &attr) })
	runtime.KeepAlive(a.Userns)
	return err
}

// MountSetattrAvailable returns nil if mount_setattr(2) exists (Linux 5.12). It makes a call that
// cannot succeed.
func MountSetattrAvailable() error {
	err := call("mount_setattr", func() error { return unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{}) })
	if errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// Mount is mount(2) of a new file system.
func Mount(source, target, fstype string, readOnly bool, data string) error {
	var flags uintptr
	if readOnly {
		flags = unix.MS_RDONLY
	}
	return call("mount", func() error { return unix.Mount(source, target, fstype, flags, data) })
}

// UnmountAt is umount2(2) on name in directory dir; it does not follow a symbolic link. It opens
// the directory, but not the mount itself, because an open mount would be EBUSY.
func UnmountAt(dir *os.File, name string) error {
	return call("umount2", func() error {
		return unix.Unmount("/proc/self/fd/"+strconv.Itoa(fdOf(dir))+"/"+name, unix.UMOUNT_NOFOLLOW)
	})
}

// DetachFile is umount2(2) with MNT_DETACH on the mount that f is on.
func DetachFile(f *os.File) error {
	return call("umount2", func() error {
		return unix.Unmount("/proc/self/fd/"+strconv.Itoa(fdOf(f)), unix.MNT_DETACH)
	})
}

// The fields of a mount that statmount(2) can return.
const (
	StatmountSBBasic   = 0x1
	StatmountMntBasic  = 0x2
	StatmountFSType    = 0x20
	StatmountMntOpts   = 0x80
	StatmountSBSource  = 0x200
	statmountFixedSize = 512
)

// Statmount is the result of statmount(2) for one mount; fields whose bit is not in Mask are unset.
type Statmount struct {
	Mask         uint64
	Major, Minor uint32
	SBFlags      uint32
	Attr         uint64
	FSType       string
	Options      string
	Source       string
}

type mntIDReq struct {
	size    uint32
	_       uint32
	mntID   uint64
	param   uint64
	mntNsID uint64
}

// StatmountByID is statmount(2) (Linux 6.8) of the mount with that unique id in this mount
// namespace; ENOSYS if the kernel lacks it.
func StatmountByID(id, mask uint64) (Statmount, error) {
	req := mntIDReq{size: 24, mntID: id, param: mask}
	for size := 4096; ; size *= 4 {
		buf := make([]uint64, size/8)
		err := call("statmount", func() error {
			_, _, e := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&buf[0])), uintptr(size),
				0, 0, 0)
			return errnoErr(e)
		})
		runtime.KeepAlive(&req)
		if errors.Is(err, unix.EOVERFLOW) && size < 1<<20 {
			continue
		}
		if err != nil {
			return Statmount{}, err
		}
		return parseStatmount(unsafe.Slice((*byte)(unsafe.Pointer(&buf[0])), size)), nil
	}
}

func parseStatmount(b []byte) Statmount {
	s := Statmount{
		Mask: u64(b, 8), Major: u32(b, 16), Minor: u32(b, 20), SBFlags: u32(b, 32),
		Attr: u64(b, 64),
	}
	str := func(bit uint64, off int) string {
		if s.Mask&bit == 0 {
			return ""
		}
		at := statmountFixedSize + int(u32(b, off))
		if at >= len(b) {
			return ""
		}
		return unix.ByteSliceToString(b[at:])
	}
	s.Options = str(StatmountMntOpts, 4)
	s.FSType = str(StatmountFSType, 36)
	s.Source = str(StatmountSBSource, 124)
	return s
}

func u32(b []byte, off int) uint32 { return *(*uint32)(unsafe.Pointer(&b[off])) }
func u64(b []byte, off int) uint64 { return *(*uint64)(unsafe.Pointer(&b[off])) }

func errnoErr(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// SBRdonly is SB_RDONLY in Statmount.SBFlags.
const SBRdonly = unix.MS_RDONLY
