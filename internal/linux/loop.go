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

// LoopInfo is struct loop_info64 with Go types, of what is used here.
type LoopInfo struct {
	Device, Inode uint64 // of the backing file
	RDevice       uint64 // the block device, where the backing file is one
	Flags         uint32
	Offset, Limit uint64 // the part of the backing file that it shows, in bytes; a limit of 0 is none
	Name          string // given by whoever bound it, or set its status
}

// Part tells whether it shows a part of the backing file only.
func (i LoopInfo) Part() bool { return i.Offset != 0 || i.Limit != 0 }

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

// LoopRemove is ioctl LOOP_CTL_REMOVE on /dev/loop-control: the loop device of that
// index, and its node, are gone. EBUSY when it is bound or open, ENODEV when there
// is none.
func LoopRemove(control *os.File, index int) error {
	return ioctl("LOOP_CTL_REMOVE", control, unix.LOOP_CTL_REMOVE, uintptr(index))
}

// LoopConfigure is ioctl LOOP_CONFIGURE (Linux 5.8): binds the device to the
// backing file in one step. sector is the device's logical block size, in bytes;
// with 0 the kernel chooses, by what direct I/O to the file wants at the moment.
// EBUSY when another process took the device first.
func LoopConfigure(loop, backing *os.File, flags, sector uint32, name string) error {
	return LoopConfigurePart(loop, backing, flags, sector, 0, name)
}

// LoopConfigurePart is LoopConfigure of a device that shows the first limit
// bytes of the backing file only.
func LoopConfigurePart(loop, backing *os.File, flags, sector uint32, limit uint64, name string) error {
	cfg := unix.LoopConfig{Fd: uint32(fdOf(backing)), Size: sector}
	cfg.Info.Sizelimit = limit
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
		Offset: info.Offset, Limit: info.Sizelimit, Name: unix.ByteSliceToString(info.File_name[:]),
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

// LoopShow has the device show that part of its backing file, in bytes (a limit of
// 0 is none), and be unbound at its last close, or not: LOOP_SET_STATUS64. EAGAIN
// when somebody writes to it at that moment.
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

// LoopChangeFD is ioctl LOOP_CHANGE_FD: a read-only device shows another file of
// the same size.
func LoopChangeFD(loop, backing *os.File) error {
	return ioctl("LOOP_CHANGE_FD", loop, loopChangeFD, backing.Fd())
}

const loopChangeFD = 0x4c06 // linux/loop.h

// LoopSetDirectIO is ioctl LOOP_SET_DIRECT_IO; EINVAL where the backing file's
// file system does not do it.
func LoopSetDirectIO(loop *os.File) error {
	return ioctl("LOOP_SET_DIRECT_IO", loop, unix.LOOP_SET_DIRECT_IO, 1)
}

// LoopSetBlockSize is ioctl LOOP_SET_BLOCK_SIZE, in bytes. EBUSY while somebody
// has the device open exclusively (Linux 6.17).
func LoopSetBlockSize(loop *os.File, size uint32) error {
	return ioctl("LOOP_SET_BLOCK_SIZE", loop, unix.LOOP_SET_BLOCK_SIZE, uintptr(size))
}

// DeletePartition is ioctl BLKPG_DEL_PARTITION: the device's partition of that
// number is no device any more. ENXIO when there is none, EBUSY when it is open.
func DeletePartition(disk *os.File, number int) error {
	part := unix.BlkpgPartition{Pno: int32(number)}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_DEL_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	return ioctlPtr("BLKPG_DEL_PARTITION", disk, unix.BLKPG, &arg)
}

// LoopSetCapacity is ioctl LOOP_SET_CAPACITY: the device takes the size that
// its backing file has now.
func LoopSetCapacity(loop *os.File) error {
	return ioctl("LOOP_SET_CAPACITY", loop, unix.LOOP_SET_CAPACITY, 0)
}

// WriteBack writes what the page cache has of a device and the device does not: sync_file_range(2).
// An error of an earlier write is told once. The call that tells of one writes nothing (Linux 6.18), so
// it is repeated: the next one is not to find more that is lost.
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

// LoopClear is ioctl LOOP_CLR_FD. When somebody else has the device open it
// is cleared at their last close instead. Otherwise it takes no write any more, and
// what only the page cache has is lost: WriteBack comes first.
func LoopClear(loop *os.File) error {
	return ioctl("LOOP_CLR_FD", loop, unix.LOOP_CLR_FD, 0)
}

// MakeDev packs a device number the way LoopInfo.Device does.
func MakeDev(major, minor uint32) uint64 { return unix.Mkdev(major, minor) }

// SplitDev is the inverse of MakeDev.
func SplitDev(dev uint64) (major, minor uint32) { return unix.Major(dev), unix.Minor(dev) }
