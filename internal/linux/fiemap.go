package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Range is a part of a file or of the device below it, in bytes.
type Range struct{ Start, Length int64 }

// Extent is an allocated part of a file, struct fiemap_extent.
type Extent struct {
	Range          // in the file
	Physical int64 // its physical position
	Shared   bool  // shared with other files or other parts of this one
}

// Extents calls f for each allocated part of a file's first length bytes, in order, with ioctl
// FS_IOC_FIEMAP. Unlike SEEK_HOLE, it reports reserved space that was never written. sync makes the
// kernel allocate data that is only in memory first. An error of f ends it. EOPNOTSUPP if the file
// system lacks the ioctl (tmpfs).
func Extents(file *os.File, length int64, sync bool, f func(Extent) error) error {
	const (
		batch       = 128
		flagSync    = 1      // FIEMAP_FLAG_SYNC
		extentLast  = 1      // FIEMAP_EXTENT_LAST
		extentShare = 0x2000 // FIEMAP_EXTENT_SHARED
		fsFiemap    = 0xc020660b
	)
	// struct fiemap and struct fiemap_extent, linux/fiemap.h.
	type extent struct {
		logical, physical, length uint64
		_                         [2]uint64
		flags                     uint32
		_                         [3]uint32
	}
	for at := int64(0); at < length; {
		var arg struct {
			start, length       uint64
			flags, mapped, room uint32
			_                   uint32
			extents             [batch]extent
		}
		arg.start, arg.length, arg.room = uint64(at), uint64(length-at), batch
		if sync {
			arg.flags = flagSync
		}
		if err := ioctlPtr("FS_IOC_FIEMAP", file, fsFiemap, &arg); err != nil {
			return err
		}
		for _, e := range arg.extents[:arg.mapped] {
			if err := f(Extent{Range{int64(e.logical), int64(e.length)}, int64(e.physical), e.flags&extentShare != 0}); err != nil {
				return err
			}
			at = max(at, int64(e.logical+e.length))
			if e.flags&extentLast != 0 {
				return nil
			}
		}
		if arg.mapped == 0 {
			return nil
		}
	}
	return nil
}

// Holes calls f for each unallocated part of a file's first length bytes, in order; f may fill
// them. Data that has no place on disk yet counts as a hole unless sync is set, which writes it
// first. Errors as for Extents.
func Holes(file *os.File, length int64, sync bool, f func(Range) error) error {
	at := int64(0)
	err := Extents(file, length, sync, func(e Extent) error {
		from := at
		at = max(at, e.Start+e.Length)
		if e.Start > from {
			return f(Range{from, min(e.Start, length) - from})
		}
		return nil
	})
	if err != nil || at >= length {
		return err
	}
	return f(Range{at, length - at})
}

// NoFiemap reports whether an error of Extents means that the file system lacks the ioctl.
func NoFiemap(err error) bool { return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) }

// Overwritten reports whether a file of btrfs is overwritten in place (FS_NOCOW_FL), unless its extents are shared.
func Overwritten(f *os.File) (bool, error) {
	flags, err := fileFlags(f)
	return flags&noCow != 0, err
}

// Overwrite makes an empty file of btrfs one that is overwritten in place. What the file inherited from its directory about compression is
// taken off first: btrfs refuses to have both.
func Overwrite(f *os.File) error {
	flags, err := fileFlags(f)
	if err != nil {
		return err
	}
	if flags&(compressed|incompressible) != 0 {
		flags &^= compressed | incompressible
		if err := setFileFlags(f, flags); err != nil {
			return err
		}
	}
	return setFileFlags(f, flags|noCow)
}

// linux/fs.h: FS_COMPR_FL, FS_NOCOMP_FL, FS_NOCOW_FL.
const compressed, incompressible, noCow = 0x4, 0x400, 0x00800000

func setFileFlags(f *os.File, flags uint32) error {
	return ioctlPtr("FS_IOC_SETFLAGS", f, 0x40086602, &flags)
}

// The kernel reads and writes an int, although the requests' numbers name a long (ioctl_iflags(2)).
func fileFlags(f *os.File) (flags uint32, err error) {
	err = ioctlPtr("FS_IOC_GETFLAGS", f, 0x80086601, &flags)
	return flags, err
}
