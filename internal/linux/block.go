package linux

import (
	"os"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

func ioctl(name string, f *os.File, req uint, arg uintptr) error {
	return call(name, func() error {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(req), arg)
		return errnoErr(e)
	})
}

func ioctlPtr[T any](name string, f *os.File, req uint, arg *T) error {
	err := ioctl(name, f, req, uintptr(unsafe.Pointer(arg)))
	runtime.KeepAlive(arg)
	return err
}

// SectorSize is ioctl BLKSSZGET: the device's logical block size, in bytes.
func SectorSize(f *os.File) (uint32, error) {
	var n int
	err := call("BLKSSZGET", func() (e error) { n, e = unix.IoctlGetInt(fdOf(f), unix.BLKSSZGET); return e })
	return uint32(n), err
}

// BlockSize64 is ioctl BLKGETSIZE64: the device's length in bytes.
func BlockSize64(f *os.File) (int64, error) {
	const blkGetSize64 = 0x80081272
	var n uint64
	err := ioctlPtr("BLKGETSIZE64", f, blkGetSize64, &n)
	return int64(n), err
}

// BlockReadOnly is ioctl BLKROGET.
func BlockReadOnly(f *os.File) (bool, error) {
	var n int32
	err := ioctlPtr("BLKROGET", f, unix.BLKROGET, &n)
	return n != 0, err
}

// Freeze is ioctl FIFREEZE: earlier writes reach the device, and new writes to the file system wait
// until Thaw. EBUSY if it is already frozen.
func Freeze(f *os.File) error { return ioctl("FIFREEZE", f, 0xc0045877, 0) }

// Thaw is ioctl FITHAW. EINVAL if it is not frozen.
func Thaw(f *os.File) error { return ioctl("FITHAW", f, 0xc0045878, 0) }

// Ext4ResizeFS is ioctl EXT4_IOC_RESIZE_FS, with the new size in file system blocks. Needs
// CAP_SYS_RESOURCE.
func Ext4ResizeFS(f *os.File, blocks uint64) error {
	return ioctlPtr("EXT4_IOC_RESIZE_FS", f, 0x40086610, &blocks)
}

// XFSGeometry holds the fields of ioctl XFS_IOC_FSGEOMETRY_V1 that growth needs.
type XFSGeometry struct {
	BlockSize  uint32
	DataBlocks uint64
	ImaxPct    uint32
}

// XFSGeometryOf is ioctl XFS_IOC_FSGEOMETRY_V1.
func XFSGeometryOf(f *os.File) (XFSGeometry, error) {
	// struct xfs_fsop_geom_v1 is 112 bytes: blocksize, rtextsize, agblocks,
	// agcount, logblocks, sectsize, inodesize, imaxpct, then datablocks.
	var raw [14]uint64
	if err := ioctlPtr("XFS_IOC_FSGEOMETRY_V1", f, 0x80705864, &raw); err != nil {
		return XFSGeometry{}, err
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(&raw)), 112)
	return XFSGeometry{BlockSize: u32(b, 0), ImaxPct: u32(b, 28), DataBlocks: u64(b, 32)}, nil
}

// XFSGrowData is ioctl XFS_IOC_FSGROWFSDATA, with the new size in blocks.
func XFSGrowData(f *os.File, blocks uint64, imaxpct uint32) error {
	arg := struct {
		newblocks uint64
		imaxpct   uint32
		_         uint32
	}{newblocks: blocks, imaxpct: imaxpct}
	return ioctlPtr("XFS_IOC_FSGROWFSDATA", f, 0x4010586e, &arg)
}

// BtrfsResizeMax is ioctl BTRFS_IOC_RESIZE: it grows a device of the file system to the size of its block device. EBUSY while another
// operation of its kind runs, such as a balance: the kernel then returns a positive number, linux/btrfs.h
// BTRFS_ERROR_DEV_EXCL_RUN_IN_PROGRESS.
func BtrfsResizeMax(f *os.File, device uint64) error {
	var arg struct {
		fd   int64
		name [4088]byte
	}
	copy(arg.name[:], strconv.FormatUint(device, 10)+":max")
	return call("BTRFS_IOC_RESIZE", func() error {
		n, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0x50009403, uintptr(unsafe.Pointer(&arg)))
		if e == 0 && n > 0 {
			e = unix.EBUSY
		}
		return errnoErr(e)
	})
}

// BtrfsDevice is ioctl BTRFS_IOC_FS_INFO: the id of the file system's only device, or 1 if it has several. A file system that was moved to
// another device (added, and the first one removed) has another id than 1.
func BtrfsDevice(f *os.File) (uint64, error) {
	info, err := btrfsInfo(f)
	if err == nil && info.devices != 1 {
		return 1, nil
	}
	return info.largest, err
}

// BtrfsID is ioctl BTRFS_IOC_FS_INFO: the UUID of the file system (fsid). Its subvolumes have it in common, and device numbers of their
// own.
func BtrfsID(f *os.File) ([16]byte, error) {
	info, err := btrfsInfo(f)
	return info.id, err
}

// btrfsFsInfo is struct btrfs_ioctl_fs_info_args: max_id (the largest device id in use), num_devices, fsid, and 992 more bytes.
type btrfsFsInfo struct {
	largest, devices uint64
	id               [16]byte
	_                [124]uint64
}

func btrfsInfo(f *os.File) (info btrfsFsInfo, err error) {
	err = ioctlPtr("BTRFS_IOC_FS_INFO", f, 0x8400941f, &info)
	return info, err
}

// BtrfsDeviceSize is ioctl BTRFS_IOC_DEV_INFO: the number of bytes that the file system uses of a device.
func BtrfsDeviceSize(f *os.File, device uint64) (uint64, error) {
	// struct btrfs_ioctl_dev_info_args: devid, uuid[16], bytes_used,
	// total_bytes, fsid[16], 377 unused u64, path[1024].
	var arg struct {
		devid      uint64
		uuid       [16]byte
		bytesUsed  uint64
		totalBytes uint64
		unused     [379]uint64
		path       [1024]byte
	}
	arg.devid = device
	if err := ioctlPtr("BTRFS_IOC_DEV_INFO", f, 0xd000941e, &arg); err != nil {
		return 0, err
	}
	return arg.totalBytes, nil
}
