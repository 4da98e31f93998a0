package ownership

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
)

// small has options of mkfs.ext4 for file systems of 4 MiB with different layouts.
var small = [][]string{
	{"-b", "4096", "-O", "^has_journal"},
	{"-b", "1024", "-O", "^has_journal"},
	{"-b", "1024", "-g", "1024", "-N", "512", "-O", "^has_journal"}, // several groups
	{"-b", "2048", "-I", "128", "-O", "^has_journal"},
	{"-b", "1024", "-O", "^64bit,^metadata_csum,^has_journal"},
	{"-b", "1024", "-g", "1024", "-O", "^flex_bg,ea_inode,^has_journal"},
	{"-b", "1024", "-J", "size=1", "-O", "orphan_file"},
	{"-b", "1024", "-O", "quota,project,^has_journal"},
	{"-b", "1024", "-C", "16384", "-O", "bigalloc,^has_journal"},
	{"-b", "1024", "-I", "512", "-O", "inline_data,mmp,^has_journal"},
	{"-b", "1024", "-g", "1024", "-O", "sparse_super2,uninit_bg,^metadata_csum,^has_journal"},
	{"-b", "1024", "-g", "1024", "-O", "meta_bg,^resize_inode,^has_journal"}, // refused
}

// images makes the file systems, each with the same files, and returns them and the number of
// files for each group and mode.
func images(f *testing.F) (list [][]byte, files map[inode]int) {
	f.Helper()
	must := func(err error) {
		f.Helper()
		if err != nil {
			f.Fatal(err)
		}
	}
	dir, files := f.TempDir(), map[inode]int{{0, 0o40700}: 1} // lost+found
	tree := filepath.Join(dir, "tree")
	for i := range 12 {
		sub := filepath.Join(tree, fmt.Sprint(i))
		must(os.MkdirAll(sub, 0o755))
		must(os.Chmod(sub, 0o755))
		name := filepath.Join(sub, "f")
		must(os.WriteFile(name, []byte("x"), 0o640))
		must(os.Chown(name, 0, 70000+i)) // more than 16 bits
		files[inode{uint32(70000 + i), 0o100640}]++
		files[inode{0, 0o40755}]++
	}
	files[inode{0, 0o40755}]++ // the root
	must(os.Chmod(tree, 0o755))
	for i, options := range small {
		img := filepath.Join(dir, fmt.Sprint("img", i))
		must(os.WriteFile(img, nil, 0o600))
		must(os.Truncate(img, 4<<20))
		if out, err := exec.Command("mkfs.ext4",
			slices.Concat([]string{"-q", "-d", tree}, options, []string{img})...).CombinedOutput(); err != nil {
			f.Fatalf("%v: %v %s", options, err, out)
		}
		b, err := os.ReadFile(img)
		must(err)
		list = append(list, b)
	}
	return list, files
}

// counted counts the bytes read.
type counted struct {
	io.ReaderAt
	bytes atomic.Int64
}

func (c *counted) ReadAt(b []byte, off int64) (int, error) {
	n, err := c.ReaderAt.ReadAt(b, off)
	c.bytes.Add(int64(n))
	return n, err
}

// FuzzExt4Inodes damages real file systems. An undamaged one yields its files. A damaged one
// yields an error or other files, but each inode at most once and no impossible inode. No more
// is read than there is.
func FuzzExt4Inodes(f *testing.F) {
	list, files := images(f)
	type place struct {
		off  uint32
		data []byte
	}
	const sb, descriptors = 1024, 2048 // with blocks of 1 KiB
	word := func(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
	for i := range list {
		for _, p := range []place{
			{0, nil}, {sb, word(0)}, {sb, word(1 << 31)}, {sb + 0x18, word(6)}, {sb + 0x28, word(8)}, {sb + 0x28, word(1)},
			{sb + 0x54, word(1 << 20)}, {sb + 0x58, word(1 << 15)},
			{sb + 0xfe, word(1 << 10)}, {sb + 0x60, word(0)}, {sb + 0x14, word(1 << 20)},
			{descriptors + 4, word(0)}, {descriptors + 8, word(1)}, {descriptors + 0xe, word(0)}, {descriptors + 0x12, word(0)},
			{descriptors + 0x1c, word(1 << 15)}, {descriptors + 0x28, word(1 << 30)},
		} {
			f.Add(uint8(i), p.off, p.data, uint32(0), []byte{})
		}
	}
	// Many groups have their tables at the same place and claim that these are full.
	const groups, length = 64, 64
	one := bytes.Clone(list[1])
	copy(one[descriptors+0x1c:], []byte{0, 0})
	f.Add(uint8(1), uint32(sb), word(binary.LittleEndian.Uint32(one[sb+0x28:])*groups), uint32(descriptors),
		bytes.Repeat(one[descriptors:descriptors+length], groups))
	f.Fuzz(func(t *testing.T, which uint8, off uint32, patch []byte, off2 uint32, patch2 []byte) {
		whole := list[int(which)%len(list)]
		b := bytes.Clone(whole)
		copy(b[int(off)%len(b):], patch)
		copy(b[int(off2)%len(b):], patch2)
		r := &counted{ReaderAt: bytes.NewReader(b)}
		found, err := collect(t, r, int64(len(b)))
		inodes := binary.LittleEndian.Uint32(b[sb:])
		for number := range found {
			if number == 0 || number > uint64(inodes) {
				t.Errorf("inode %d of %d", number, inodes)
			}
		}
		if n := r.bytes.Load(); n > 2*int64(len(b)) {
			t.Errorf("%d bytes were read of %d", n, len(b))
		}
		if !bytes.Equal(b, whole) {
			return
		}
		if slices.Contains(small[int(which)%len(list)], "meta_bg,^resize_inode,^has_journal") {
			if err == nil {
				t.Error("a layout that is not known was read")
			}
			return
		}
		got := map[inode]int{}
		for _, i := range found {
			got[i]++
		}
		if err != nil || fmt.Sprint(got) != fmt.Sprint(files) {
			t.Errorf("%q: %v, want %v (%v)", small[int(which)%len(list)], got, files, err)
		}
	})
}
