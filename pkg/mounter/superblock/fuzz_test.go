package superblock

import (
	"io"
	"math/bits"
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// disk is a device that is zero except for its first bytes and a patch.
type disk struct {
	head, patch []byte
	off, size   int64 // of the patch; of the device
}

func (d disk) ReadAt(b []byte, off int64) (int, error) {
	n := int(min(int64(len(b)), max(d.size-off, 0)))
	clear(b[:n])
	for _, piece := range []struct {
		data []byte
		at   int64
	}{{d.head, 0}, {d.patch, d.off}} {
		from, to := max(off, piece.at), min(off+int64(n), piece.at+int64(len(piece.data)))
		if from < to {
			copy(b[from-off:to-off], piece.data[from-piece.at:])
		}
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// original is the output of a mkfs program, and the range that a checksum protects: all of
// [from, to) except the fields that select the checksum.
type original struct {
	name     string
	size     int64
	from, to int64
	but      [][2]int64
}

var originals = []original{
	{name: "blank", size: testSize}, {name: "ext4", size: 4 << 20}, {name: "vfat", size: 4 << 20}, {name: "swap", size: 4 << 20},
	{name: "ext4", size: testSize, from: 1024, to: 2048, but: [][2]int64{{1024 + 0x64, 1024 + 0x68}}},
	{name: "xfs", size: testSize, from: 0, to: 512, but: [][2]int64{{100, 102}}},
	{name: "btrfs", size: testSize, from: 64 << 10, to: 68 << 10, but: [][2]int64{{64<<10 + 4, 64<<10 + 32}, {64<<10 + 196, 64<<10 + 198}}},
	{name: "f2fs", size: testSize, from: 1024, to: 4096, but: [][2]int64{{1024 + 2180, 1024 + 2184}}},
}

// FuzzProbe damages the content of a device. A device with content is never Blank, and a file
// system with a wrong checksum is never Known. The data reported for a Known file system is
// plausible for this device.
func FuzzProbe(f *testing.F) {
	heads := make([][]byte, len(originals))
	for i, o := range originals {
		if argv := makers[o.name]; argv != nil {
			path := blankImage(f, o.size)
			mkfs(f, path, argv...)
			file, err := os.Open(path)
			if err != nil {
				f.Fatal(err)
			}
			heads[i] = make([]byte, 300<<10)
			if _, err := io.ReadFull(file, heads[i]); err != nil {
				f.Fatal(err)
			}
			file.Close()
		}
		f.Add(uint8(i), uint32(0), []byte{})
		f.Add(uint8(i), uint32(o.from+0x78), []byte("flipped"))
		f.Add(uint8(i), uint32(o.from+108), []byte("flipped")) // the label of xfs
		f.Add(uint8(i), uint32(o.from), make([]byte, 4096))
		f.Add(uint8(i), uint32(o.size-1), []byte{1})
		f.Add(uint8(i), uint32(512), []byte("LABELONE"))
		f.Add(uint8(i), uint32(64<<10+144), append(make([]byte, 52), 1)) // btrfs: no sector size, and an unknown checksum type
		f.Add(uint8(i), uint32(1024+0x64), []byte{0, 0, 0, 0, 0xff})
	}
	f.Fuzz(func(t *testing.T, which uint8, off uint32, patch []byte) {
		o, head := originals[int(which)%len(originals)], heads[int(which)%len(originals)]
		d := disk{head: head, patch: patch, off: int64(off) % o.size, size: o.size}
		r, err := Probe(d, d.size)
		if err != nil {
			t.Fatal(err)
		}
		if r.Content == Known && r.Type == "" || r.Content == Unknown && r.Detail == "" {
			t.Errorf("an answer without words: %+v", r)
		}
		start, end := make([]byte, closeBy), make([]byte, tailSize)
		if _, err := d.ReadAt(start, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := d.ReadAt(end, d.size-tailSize); err != nil {
			t.Fatal(err)
		}
		if r.Content == Blank && (nonZero(start) >= 0 || nonZero(end) >= 0) {
			t.Errorf("called blank, with a byte at %d of the start, %d of the end", nonZero(start), nonZero(end))
		}
		if r.BlockSize != 0 && (r.Content != Known || r.Size <= 0 || r.Size > d.size ||
			bits.OnesCount64(uint64(r.BlockSize)) != 1 || r.BlockSize < 512 || r.BlockSize > 64<<10) {
			t.Errorf("makes no sense: %+v", r)
		}
		if r.Content == Known && len(fstype.Of(r.Type).Make) > 0 && r.BlockSize == 0 {
			t.Errorf("without a block size: %+v", r)
		}
		if whole := d.off+int64(len(patch)) <= o.from || d.off >= o.to || o.to == 0; !whole && r.Content == Known && r.Type == o.name {
			changed := false
			for i, c := range patch {
				at := d.off + int64(i)
				if at < o.from || at >= o.to || at >= int64(len(head)) || head[at] == c {
					continue
				}
				for _, but := range o.but {
					if at >= but[0] && at < but[1] {
						return
					}
				}
				changed = true
			}
			if changed {
				t.Errorf("%s with other bytes from %d on is taken for whole: %+v", o.name, d.off, r)
			}
		}
	})
}
