package ownership

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Inodes finds every inode of a file system without reading names: it reads the inode tables on
// the device. The zero value finds none. Use it after the file system was mounted, so that its
// journal has been replayed, and before anybody but the caller can change it.
type Inodes struct{ device string }

// nothingToChange reports whether all inodes except the root have the wanted group and mode. If
// it returns false, some have not, or only a walk can tell.
func nothingToChange(ctx context.Context, inodes Inodes, gid uint32, root uint64, p *Progress) bool {
	if inodes == (Inodes{}) {
		return false
	}
	var wrong atomic.Bool
	err := inodes.each(ctx, func(i linux.Inode) bool {
		if i.Ino == root {
			return true
		}
		p.Looked.Add(1)
		if chgrp, chmod, _ := wanted(i, gid); chgrp || chmod {
			wrong.Store(true)
		}
		return !wrong.Load()
	})
	if err != nil || wrong.Load() {
		p.Looked.Store(0)
		return false
	}
	return true
}

// InodesOf returns the inodes of a file system of type name on a device. For a type without
// InodeTables it returns the zero value.
func InodesOf(device, name string) Inodes {
	if !fstype.Of(name).InodeTables {
		return Inodes{}
	}
	return Inodes{device}
}

// each calls f for every inode that has a name, in any order and from several goroutines
// concurrently. It stops early if f returns false. After an error, the result is meaningless.
func (n Inodes) each(ctx context.Context, f func(linux.Inode) bool) error {
	device, err := os.Open(n.device)
	if err != nil {
		return err
	}
	defer device.Close()
	size, err := device.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	return ext4Inodes(ctx, device, size, f)
}

// ext4 has the needed parts of a superblock and its group descriptors.
type ext4 struct {
	r             io.ReaderAt
	blockSize     int64
	inodeSize     int64
	perGroup      uint32 // inodes in a block group
	firstInode    uint32 // the first inode that is not reserved
	hidden        [2]uint32
	descriptors   []byte
	descriptorLen int64
}

const (
	ext4Magic        = 0xef53
	ext4RootInode    = 2
	ext4MetaBG       = 1 << 4
	ext4Has64Bit     = 1 << 7
	ext4InodeUninit  = 1 << 0  // bg_flags
	ext4IsEAInode    = 1 << 21 // i_flags: holds the value of an extended attribute
	ext4MaxBlockSize = 64 << 10
)

func le16(b []byte, off int64) uint16 { return binary.LittleEndian.Uint16(b[off:]) }
func le32(b []byte, off int64) uint32 { return binary.LittleEndian.Uint32(b[off:]) }

// readExt4 reads the description of the inode tables of an ext4. The size of the device is in
// bytes.
func readExt4(r io.ReaderAt, device int64) (*ext4, error) {
	sb := make([]byte, 1024)
	if _, err := r.ReadAt(sb, 1024); err != nil {
		return nil, err
	}
	incompat := le32(sb, 0x60)
	e := &ext4{
		r: r, blockSize: 1024 << min(le32(sb, 0x18), 7), inodeSize: int64(le16(sb, 0x58)), perGroup: le32(sb, 0x28),
		firstInode: le32(sb, 0x54), descriptorLen: 32,
		hidden: [2]uint32{le32(sb, 0x26c), le32(sb, 0x280)}, // project quota, orphan file
	}
	inodes := le32(sb, 0)
	if incompat&ext4Has64Bit != 0 {
		e.descriptorLen = int64(le16(sb, 0xfe))
	}
	switch {
	case le16(sb, 0x38) != ext4Magic:
		return nil, errors.New("no ext4")
	case le32(sb, 0x4c) == 0: // before dynamic inode sizes
		return nil, errors.New("an ext4 of revision 0")
	case incompat&ext4MetaBG != 0:
		return nil, errors.New("group descriptors in many places (meta_bg)")
	case e.blockSize > ext4MaxBlockSize, e.inodeSize < 128, e.inodeSize > e.blockSize, bits.OnesCount64(uint64(e.inodeSize)) != 1,
		e.perGroup == 0, int64(e.perGroup) > 8*e.blockSize, inodes == 0, inodes%e.perGroup != 0,
		e.descriptorLen < 32, e.descriptorLen > e.blockSize, e.firstInode <= ext4RootInode, e.firstInode > e.perGroup:
		return nil, errors.New("an ext4 whose superblock does not add up")
	case int64(inodes)*e.inodeSize > device: // otherwise groups that share a table would be read repeatedly
		return nil, fmt.Errorf("an ext4 with %d inodes of %d bytes on a device of %d bytes", inodes, e.inodeSize, device)
	}
	const most = 64 << 20 // the descriptors of 128 TiB
	size := int64(inodes/e.perGroup) * e.descriptorLen
	if size > min(most, device) {
		return nil, fmt.Errorf("%d bytes of group descriptors", size)
	}
	e.descriptors = make([]byte, size)
	// The descriptors follow the block of the superblock. (The first data block gives the same
	// position, except with bigalloc.)
	_, err := r.ReadAt(e.descriptors, (1024/e.blockSize+1)*e.blockSize)
	return e, err
}

// group is one block group: the position of its inodes, and how many are in use.
type group struct {
	bitmap, table int64 // block numbers
	used, tail    uint32
}

func (e *ext4) group(n int) group {
	d := e.descriptors[int64(n)*e.descriptorLen:][:e.descriptorLen]
	g := group{bitmap: int64(le32(d, 4)), table: int64(le32(d, 8))}
	free, unused := uint32(le16(d, 0xe)), uint32(le16(d, 0x1c))
	if e.descriptorLen >= 64 {
		g.bitmap |= int64(le32(d, 0x24)) << 32
		g.table |= int64(le32(d, 0x28)) << 32
		free |= uint32(le16(d, 0x2e)) << 16
		unused |= uint32(le16(d, 0x32)) << 16
	}
	if le16(d, 0x12)&ext4InodeUninit != 0 {
		unused = e.perGroup
	}
	g.used, g.tail = e.perGroup-min(free, e.perGroup), e.perGroup-min(unused, e.perGroup)
	return g
}

// ext4Inodes reads the inode tables of an ext4. The layout is in Documentation/filesystems/ext4
// of Linux. Any inconsistency is an error.
func ext4Inodes(ctx context.Context, r io.ReaderAt, device int64, each func(linux.Inode) bool) error {
	e, err := readExt4(r, device)
	if err != nil {
		return err
	}
	var next atomic.Int64
	var over atomic.Bool
	var workers sync.WaitGroup
	count := runtime.GOMAXPROCS(0)
	errs := make([]error, count)
	for w := range count {
		workers.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					errs[w] = fmt.Errorf("panic: %v", p)
					over.Store(true)
				}
			}()
			const chunk = 256 << 10
			buf := make([]byte, max(chunk, e.blockSize))
			for !over.Load() {
				n := int(next.Add(1) - 1)
				if n >= len(e.descriptors)/int(e.descriptorLen) {
					return
				}
				goOn, err := e.scan(n, buf, each)
				if err == nil {
					err = ctx.Err()
				}
				if err != nil || !goOn {
					errs[w] = err
					over.Store(true)
				}
			}
		})
	}
	workers.Wait()
	return errors.Join(errs...)
}

// scan reads the inodes of one group.
func (e *ext4) scan(n int, buf []byte, each func(linux.Inode) bool) (goOn bool, err error) {
	g := e.group(n)
	if g.used == 0 || g.tail == 0 {
		if g.used != 0 {
			return false, fmt.Errorf("block group %d has %d inodes in use and none", n, g.used)
		}
		return true, nil
	}
	bitmap := make([]byte, (e.perGroup+7)/8)
	if _, err := e.r.ReadAt(bitmap, g.bitmap*e.blockSize); err != nil {
		return false, err
	}
	// The counters must agree, because the data may be damaged.
	inUse := uint32(0)
	for i := range e.perGroup {
		if bitmap[i/8]&(1<<(i%8)) != 0 {
			if inUse++; i >= g.tail {
				return false, fmt.Errorf("block group %d: inode %d is in use and not initialised", n, i)
			}
		}
	}
	if inUse != g.used {
		return false, fmt.Errorf("block group %d: %d inodes in use, and %d by its bitmap", n, g.used, inUse)
	}
	inChunk := uint32(int64(len(buf)) / e.inodeSize)
	for first := uint32(0); first < g.tail; first += inChunk {
		table := buf[:int64(min(inChunk, g.tail-first))*e.inodeSize]
		if _, err := e.r.ReadAt(table, g.table*e.blockSize+int64(first)*e.inodeSize); err != nil {
			return false, err
		}
		for i := uint32(0); len(table) > 0; i, table = i+1, table[e.inodeSize:] {
			at := first + i
			if bitmap[at/8]&(1<<(at%8)) == 0 {
				continue
			}
			number := uint32(n)*e.perGroup + at + 1
			inode, ok := e.inode(number, table[:e.inodeSize])
			if ok && !each(inode) {
				return false, nil
			}
		}
	}
	return true, nil
}

// inode decodes one inode. For an inode without a directory entry, ok is false.
func (e *ext4) inode(number uint32, b []byte) (linux.Inode, bool) {
	if number != ext4RootInode && number < e.firstInode || number == e.hidden[0] || number == e.hidden[1] {
		return linux.Inode{}, false
	}
	links := le16(b, 0x1a)
	if links == 0 || le32(b, 0x20)&ext4IsEAInode != 0 {
		return linux.Inode{}, false
	}
	return linux.Inode{
		Ino: uint64(number), Mode: le16(b, 0), Links: uint32(links),
		GID: uint32(le16(b, 0x18)) | uint32(le16(b, 0x7a))<<16,
	}, true
}
