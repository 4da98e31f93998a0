package superblock

import (
	"maps"
	"slices"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// copies are the copies that a format keeps of its superblock. A device whose beginning was wiped still has them.
type copies struct {
	of     string
	marks  []mark                                // from the start of a copy's 4 KiB block
	places func(size int64, add func(off int64)) // adds where copies may be on a device of this size
}

var extCopies = &copies{
	of: "ext2, ext3 or ext4", marks: []mark{{56, "\x53\xef"}, {1024 + 56, "\x53\xef"}},
	// The first block of groups that are powers of 3, 5, 7 (sparse_super), for block sizes of 1, 2 and 4 KiB.
	places: func(size int64, add func(off int64)) {
		for _, group := range []int64{8<<20 + 1024, 32 << 20, 128 << 20} {
			add(group)
			for _, base := range []int64{3, 5, 7} {
				for g := base; g < size/group+1 && g < 1<<20; g *= base {
					add(g*group - (group&1024)*(g-1))
				}
			}
		}
	},
}

var xfsCopies = &copies{
	of: fstype.XFS, marks: []mark{{0, "XFSB"}},
	// Allocation groups: mkfs makes 4 of equal size, or of 1 TiB.
	places: func(size int64, add func(off int64)) {
		for i := int64(1); i < 4; i++ {
			add((size / 4) * i)
			add((size/4 + 4095) * i)
			add(i << 40)
		}
	},
}

var btrfsCopies = &copies{
	of: fstype.Btrfs, marks: []mark{{64, "_BHRfS_M"}},
	places: func(_ int64, add func(off int64)) {
		add(64 << 20)
		add(256 << 30)
	},
}

// backupPlaces lists the offsets of 4 KiB blocks to read, ascending, from closeBy to size: those of copies, and samples of the whole
// device.
func backupPlaces(size int64) []int64 {
	seen := map[int64]bool{}
	add := func(off int64) {
		off &^= 4095
		if off >= closeBy && off < size {
			seen[off] = true
		}
	}
	for _, f := range formats {
		if f.copies != nil {
			f.copies.places(size, add)
		}
	}
	const samples = 64
	for i := int64(1); i < samples; i++ {
		add(size / samples * i)
	}
	return slices.Sorted(maps.Keys(seen))
}

// nameBackup says what a block with data is.
func nameBackup(b []byte) string {
	m := &image{head: b, size: int64(len(b))}
	for _, f := range formats {
		if f.copies == nil {
			continue
		}
		for _, k := range f.copies.marks {
			if m.has(k.off, k.magic) {
				return "a backup superblock of " + f.copies.of
			}
		}
	}
	return "of no known format"
}
