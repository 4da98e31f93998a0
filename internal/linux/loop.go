package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// Flags of a loop device, loop(4).
const (
	LoopReadOnly  = unix.LO_FLAGS_READ_ONLY
	LoopAutoclear = unix.LO_FLAGS_AUTOCLEAR
	LoopDirectIO  = unix.LO_FLAGS_DIRECT_IO
)

// LoopInfo is struct loop_info64 with Go types, of what is used here.
type LoopInfo struct {
	Device, Inode uint64 // of the backing file
	RDevice       uint64 // the block device, where the backing file is one
	Flags         uint32
	Part          bool // it shows a part of the backing file only
}

// LoopGetFree is ioctl LOOP_CTL_GET_FREE on /dev/loop-control: the index of a
// free loop device, made if need be.
func LoopGetFree(control *os.File) (int, error) {
	var n int
	err := call("LOOP_CTL_GET_FREE", func() (e error) {
		n, e = unix.IoctlRetInt(fdOf(control), unix.LOOP_CTL_GET_FREE)
		return e
	})
	return n, err
}

// LoopConfigure is ioctl LOOP_CONFIGURE (Linux 5.8): binds the device to the
// backing file in one step. sector is the device's logical block size, in bytes;
// with 0 the kernel chooses, by what direct I/O to the file wants at the moment.
// EBUSY when another process took the device first.
func LoopConfigure(loop, backing *os.File, flags, sector uint32, name string) error {
	cfg := unix.LoopConfig{Fd: uint32(fdOf(backing)), Size: sector}
	cfg.Info.Flags = flags
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], name)
	return call("LOOP_CONFIGURE", func() error { return unix.IoctlLoopConfigure(fdOf(loop), &cfg) })
}

// LoopStatus is ioctl LOOP_GET_STATUS64; ENXIO when the device is free.
func LoopStatus(loop *os.File) (LoopInfo, error) {
	var info *unix.LoopInfo64
	err := call("LOOP_GET_STATUS64", func() (e error) { info, e = unix.IoctlLoopGetStatus64(fdOf(loop)); return e })
	if err != nil {
		return LoopInfo{}, err
	}
	return LoopInfo{
		Device: info.Device, Inode: info.Inode, RDevice: info.Rdevice, Flags: info.Flags,
		Part: info.Offset != 0 || info.Sizelimit != 0,
	}, nil
}

// LoopKeep clears LO_FLAGS_AUTOCLEAR, so that the device stays bound when its
// last user closes it.
func LoopKeep(loop *os.File) error {
	info, err := unix.IoctlLoopGetStatus64(fdOf(loop))
	if err != nil {
		return os.NewSyscallError("LOOP_GET_STATUS64", err)
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	return call("LOOP_SET_STATUS64", func() error { return unix.IoctlLoopSetStatus64(fdOf(loop), info) })
}

// LoopSetCapacity is ioctl LOOP_SET_CAPACITY: the device takes the size that
// its backing file has now.
func LoopSetCapacity(loop *os.File) error {
	return ioctl("LOOP_SET_CAPACITY", loop, unix.LOOP_SET_CAPACITY, 0)
}

// LoopClear is ioctl LOOP_CLR_FD. When somebody else has the device open it
// is cleared at their last close instead.
func LoopClear(loop *os.File) error {
	return ioctl("LOOP_CLR_FD", loop, unix.LOOP_CLR_FD, 0)
}

// MakeDev packs a device number the way LoopInfo.Device does.
func MakeDev(major, minor uint32) uint64 { return unix.Mkdev(major, minor) }

// SplitDev is the inverse of MakeDev.
func SplitDev(dev uint64) (major, minor uint32) { return unix.Major(dev), unix.Minor(dev) }
