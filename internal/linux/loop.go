package linux

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of a loop device, loop(4).
const (
	LoopReadOnly  = unix.LO_FLAGS_READ_ONLY
	LoopAutoclear = unix.LO_FLAGS_AUTOCLEAR
	LoopDirectIO  = unix.LO_FLAGS_DIRECT_IO
	LoopPartscan  = unix.LO_FLAGS_PARTSCAN
)

// LoopInfo holds the fields of struct loop_info64 that are used here, with Go types.
type LoopInfo struct {
	Device, Inode uint64 // of the backing file
	RDevice       uint64 // the block device, if the backing file is one
	Flags         uint32
	Offset, Limit uint64 // the visible part of the backing file, in bytes; limit 0: to its end
	Name          string // set by whoever bound it or set its status
}

// Part reports whether the device shows only a part of the backing file.
func (i LoopInfo) Part() bool { return i.Offset != 0 || i.Limit != 0 }

// LoopGetFree is ioctl LOOP_CTL_GET_FREE on /dev/loop-control: it returns the index of a free loop
// device, made if necessary.
func LoopGetFree(control *os.File) (int, error) {
	var n int
	err := call("LOOP_CTL_GET_FREE", func() (e error) {
		n, e = unix.IoctlRetInt(fdOf(control), unix.LOOP_CTL_GET_FREE)
		return e
	})
	return n, err
}

// LoopAdd is ioctl LOOP_CTL_ADD on /dev/loop-control with a negative number: it makes a further loop device, and returns its index.
func LoopAdd(control *os.File) (int, error) {
	var n int
	err := call("LOOP_CTL_ADD", func() (e error) {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fdOf(control)), unix.LOOP_CTL_ADD, ^uintptr(0))
		n, e = int(r), errnoErr(errno)
		return e
	})
	return n, err
}

// LoopRemove is ioctl LOOP_CTL_REMOVE on /dev/loop-control: it removes the loop device with that
// index, and its node. EBUSY if it is bound or open, ENODEV if there is none.
func LoopRemove(control *os.File, index int) error {
	return ioctl("LOOP_CTL_REMOVE", control, unix.LOOP_CTL_REMOVE, uintptr(index))
}

// LoopConfigure is ioctl LOOP_CONFIGURE (Linux 5.8): it binds the device to the backing file in one
// step. sector is the device's logical block size in bytes; with 0 the kernel chooses what direct
// I/O to the file currently wants. EBUSY if another process took the device first.
func LoopConfigure(loop, backing *os.File, flags, sector uint32, name string) error {
	return LoopConfigurePart(loop, backing, flags, sector, 0, name)
}

// LoopConfigurePart is LoopConfigure of a device that shows only the first limit bytes of the
// backing file.
func LoopConfigurePart(loop, backing *os.File, flags, sector uint32, limit uint64, name string) error {
	cfg := unix.LoopConfig{Fd: uint32(fdOf(backing)), Size: sector}
	cfg.Info.Sizelimit = limit
	cfg.Info.Flags = flags
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], name)
	return call("LOOP_CONFIGURE", func() error { return unix.IoctlLoopConfigure(fdOf(loop), &cfg) })
}

// LoopStatus is ioctl LOOP_GET_STATUS64; ENXIO if the device is free.
func LoopStatus(loop *os.File) (LoopInfo, error) {
	var info *unix.LoopInfo64
	err := call("LOOP_GET_STATUS64", func() (e error) { info, e = unix.IoctlLoopGetStatus64(fdOf(loop)); return e })
	if err != nil {
		return LoopInfo{}, err
	}
	return LoopInfo{
		Device: info.Device, Inode: info.Inode, RDevice: info.Rdevice, Flags: info.Flags,
		Offset: info.Offset, Limit: info.Sizelimit, Name: unix.ByteSliceToString(info.File_name[:]),
	}, nil
}

// LoopKeep clears LO_FLAGS_AUTOCLEAR, so that the device stays bound after its last user closes it.
func LoopKeep(loop *os.File) error {
	info, err := unix.IoctlLoopGetStatus64(fdOf(loop))
	if err != nil {
		return os.NewSyscallError("LOOP_GET_STATUS64", err)
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	return call("LOOP_SET_STATUS64", func() error { return unix.IoctlLoopSetStatus64(fdOf(loop), info) })
}

// LoopShow is LOOP_SET_STATUS64: it sets the visible part of the backing file, in bytes (limit 0:
// to its end), and whether the last close unbinds the device. EAGAIN while somebody writes to it.
func LoopShow(loop *os.File, offset, limit uint64, autoclear bool, name string) error {
	info, err := unix.IoctlLoopGetStatus64(fdOf(loop))
	if err != nil {
		return os.NewSyscallError("LOOP_GET_STATUS64", err)
	}
	info.Offset, info.Sizelimit = offset, limit
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if autoclear {
		info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	info.File_name = [64]uint8{}
	copy(info.File_name[:len(info.File_name)-1], name)
	return call("LOOP_SET_STATUS64", func() error { return unix.IoctlLoopSetStatus64(fdOf(loop), info) })
}

// LoopChangeFD is ioctl LOOP_CHANGE_FD: a read-only device shows another file of the same size.
func LoopChangeFD(loop, backing *os.File) error {
	return ioctl("LOOP_CHANGE_FD", loop, loopChangeFD, backing.Fd())
}

const loopChangeFD = 0x4c06 // linux/loop.h

// LoopSetDirectIO is ioctl LOOP_SET_DIRECT_IO; EINVAL if the backing file's file system does not
// support it.
func LoopSetDirectIO(loop *os.File) error {
	return ioctl("LOOP_SET_DIRECT_IO", loop, unix.LOOP_SET_DIRECT_IO, 1)
}

// LoopSetBlockSize is ioctl LOOP_SET_BLOCK_SIZE, in bytes. EBUSY while somebody has the device open
// exclusively (Linux 6.17).
func LoopSetBlockSize(loop *os.File, size uint32) error {
	return ioctl("LOOP_SET_BLOCK_SIZE", loop, unix.LOOP_SET_BLOCK_SIZE, uintptr(size))
}

// DeletePartition is ioctl BLKPG_DEL_PARTITION: it removes the device of the partition with that
// number. ENXIO if there is none, EBUSY if it is open.
func DeletePartition(disk *os.File, number int) error {
	part := unix.BlkpgPartition{Pno: int32(number)}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_DEL_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	return ioctlPtr("BLKPG_DEL_PARTITION", disk, unix.BLKPG, &arg)
}

// LoopSetCapacity is ioctl LOOP_SET_CAPACITY: the device takes the current size of its backing
// file.
func LoopSetCapacity(loop *os.File) error {
	return ioctl("LOOP_SET_CAPACITY", loop, unix.LOOP_SET_CAPACITY, 0)
}

// WriteBack writes a device's dirty page cache to it: sync_file_range(2). The kernel reports an
// error of an earlier write once. The call that reports it writes nothing (Linux 6.18), so
// WriteBack repeats it, and the next WriteBack finds no further loss.
func WriteBack(device *os.File) error {
	const (
		all  = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		most = 10 // the kernel may write by itself between two of them
	)
	var first error
	for range most {
		err := call("sync_file_range", func() error { return unix.SyncFileRange(fdOf(device), 0, 0, all) })
		if err == nil {
			break
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// LoopClear is ioctl LOOP_CLR_FD. If somebody else has the device open, their last close clears it.
// Otherwise the device accepts no more writes, and data that is only in the page cache is lost:
// call WriteBack first.
func LoopClear(loop *os.File) error {
	return ioctl("LOOP_CLR_FD", loop, unix.LOOP_CLR_FD, 0)
}

// MakeDev packs a device number the way LoopInfo.Device does.
func MakeDev(major, minor uint32) uint64 { return unix.Mkdev(major, minor) }

// SplitDev is the inverse of MakeDev.
func SplitDev(dev uint64) (major, minor uint32) { return unix.Major(dev), unix.Minor(dev) }
