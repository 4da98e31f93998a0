package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Backing describes what a bound loop device is bound to.
type Backing struct {
	// File is the regular file, open for reading and verified to be the one that the kernel has
	// bound; nil if its path cannot be reached from here.
	File *os.File
	// Block is set if the device is bound to a block device, with this number.
	Block        bool
	Major, Minor uint32
	// Offset and Limit are the visible part of it, in bytes; Limit 0 means to its end.
	Offset, Limit int64
}

// Close closes the file.
func (b Backing) Close() {
	if b.File != nil {
		b.File.Close()
	}
}

// OpenBacking opens what an open loop device is bound to. ok is false if it is not a loop device,
// or a free one. The caller closes the result.
func OpenBacking(loop *os.File) (b Backing, ok bool, err error) {
	st, err := linux.StatxFile(loop)
	if err != nil {
		return b, false, err
	}
	dir := fmt.Sprintf("/sys/dev/block/%d:%d/loop/", st.RdevMajor, st.RdevMinor)
	path, err := linux.ReadSmall(dir + "backing_file")
	if errors.Is(err, linux.ENOENT) {
		return b, false, nil
	}
	if err != nil {
		return b, false, err
	}
	info, err := linux.LoopStatus(loop)
	if errors.Is(err, linux.ENXIO) {
		return b, false, nil
	}
	if err != nil {
		return b, false, err
	}
	if b.Offset, err = readNumber(dir + "offset"); err != nil {
		return b, false, err
	}
	if b.Limit, err = readNumber(dir + "sizelimit"); err != nil {
		return b, false, err
	}
	if info.RDevice != 0 {
		b.Block = true
		b.Major, b.Minor = linux.SplitDev(info.RDevice)
		return b, true, nil
	}
	f, err := linux.Open(strings.TrimSuffix(path, "\n"), os.O_RDONLY|linux.ONofollow)
	if linux.Short(err) {
		return b, false, err
	}
	if err != nil {
		return b, true, nil // of another mount namespace, or deleted
	}
	at, err := linux.StatxFile(f)
	if err != nil || !at.IsRegular() || linux.MakeDev(at.DevMajor, at.DevMinor) != info.Device || at.Ino != info.Inode {
		f.Close()
		return b, true, err
	}
	b.File = f
	return b, true, nil
}

// IsPartition reports whether the block device with that number is a partition of a loop device. It has the ioctls of the whole one.
func IsPartition(major, minor uint32) (bool, error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if errors.Is(err, linux.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	_, is := loopName(filepath.Dir(link))
	return is, nil
}

func readNumber(path string) (int64, error) {
	s, err := linux.ReadSmall(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(s), 10, 64)
}
