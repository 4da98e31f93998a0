package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Range is a part of a file, in bytes.
type Range struct{ Start, Length int64 }

// Unallocated gives the parts of the first length bytes of f that take no
// space, by ioctl FS_IOC_FIEMAP. What was reserved and never written takes
// space; SEEK_HOLE would call it a hole. EOPNOTSUPP where the file system does
// not tell (tmpfs).
func Unallocated(f *os.File, length int64) ([]Range, error) {
	const (
		batch    = 128
		sync     = 1 // FIEMAP_FLAG_SYNC: what is only in memory gets its place first
		fsFiemap = 0xc020660b
	)
	// struct fiemap and struct fiemap_extent, linux/fiemap.h.
	type extent struct {
		logical uint64
		_       uint64 // physical
		length  uint64
		_       [2]uint64
		_       uint32 // flags
		_       [3]uint32
	}
	var holes []Range
	at := int64(0)
	for at < length {
		var arg struct {
			start, length       uint64
			flags, mapped, room uint32
			_                   uint32
			extents             [batch]extent
		}
		arg.start, arg.length, arg.flags, arg.room = uint64(at), uint64(length-at), sync, batch
		if err := ioctlPtr("FS_IOC_FIEMAP", f, fsFiemap, &arg); err != nil {
			return nil, err
		}
		if arg.mapped == 0 {
			break
		}
		for _, e := range arg.extents[:arg.mapped] {
			if start := int64(e.logical); start > at {
				holes = append(holes, Range{at, min(start, length) - at})
			}
			at = max(at, int64(e.logical+e.length))
		}
	}
	if at < length {
		holes = append(holes, Range{at, length - at})
	}
	return holes, nil
}

// NoFiemap tells whether an error of Unallocated means that the file system
// does not know.
func NoFiemap(err error) bool { return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) }
