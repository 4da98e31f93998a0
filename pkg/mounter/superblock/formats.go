package superblock

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"
	"strings"
	"unicode/utf16"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// A detector reports whether a format's signature is present. If the format's own checks fail,
// the result is Unknown.
type detector func(*image) (Result, bool)

type format struct {
	detect detector
	copies *copies // nil: a look at the device's beginning and end misses none
}

var formats = []format{
	{ext, extCopies}, {xfs, xfsCopies}, {btrfs, btrfsCopies}, {detect: f2fs}, {detect: swap}, {detect: luks}, {detect: lvm2},
	{detect: md}, {detect: gpt}, {detect: bootSector}, {detect: zfs},
	{detect: magics("bcache", mark{4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
		mark{4096 + 24, "\xc6\x85\x73\xf8\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"})}, // bcachefs
	{detect: magics("squashfs", mark{0, "hsqs"})},
	{detect: magics("iso9660", mark{32769, "CD001"})},
	{detect: magics("erofs", mark{1024, "\xe2\xe1\xf5\xe0"})},
	{detect: magics("jfs", mark{32768, "JFS1"})},
	{detect: magics("reiserfs", mark{65536 + 52, "ReIsEr"})},
	{detect: magics("ceph_bluestore", mark{0, "bluestore block device"})},
	{detect: magics("vdo", mark{0, "dmvdo001"})},
	{detect: magics("drbd", mark{-4096 + 60, "\x83\x74\x02\x6b"})},
}

type mark struct {
	off   int64 // negative: relative to the end
	magic string
}

func magics(name string, marks ...mark) detector {
	return func(m *image) (Result, bool) {
		for _, k := range marks {
			off := k.off
			if off < 0 {
				off += m.size
			}
			if m.has(off, k.magic) {
				return Result{Content: Known, Type: name}, true
			}
		}
		return Result{}, false
	}
}

func known(name string) (Result, bool) { return Result{Content: Known, Type: name}, true }

func damaged(name, format string, args ...any) (Result, bool) {
	return Result{Type: name, Detail: name + " superblock: " + fmt.Sprintf(format, args...)}, true
}

var le, be = binary.LittleEndian, binary.BigEndian

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func uuid(b []byte) string {
	if nonZero(b) < 0 {
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

func label(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return strings.ToValidUTF8(s, "?")
}

// ext: fs/ext4/ext4.h, struct ext4_super_block.
func ext(m *image) (Result, bool) {
	sb := m.at(1024, 1024)
	if sb == nil || le.Uint16(sb[0x38:]) != 0xef53 {
		return Result{}, false
	}
	const (
		compatHasJournal    = 0x4
		incompatJournalDev  = 0x8
		incompatRecover     = 0x4
		incompatExt3        = 0x2 | 0x4 | 0x10 // filetype, recover, meta_bg
		roCompatExt3        = 0x1 | 0x2 | 0x4  // sparse_super, large_file, btree_dir
		roCompatMetadataSum = 0x400
		incompat64bit       = 0x80
	)
	compat, incompat, roCompat := le.Uint32(sb[0x5c:]), le.Uint32(sb[0x60:]), le.Uint32(sb[0x64:])
	logBlock := le.Uint32(sb[0x18:])
	blocks := uint64(le.Uint32(sb[0x4:]))
	if incompat&incompat64bit != 0 {
		blocks |= uint64(le.Uint32(sb[0x150:])) << 32
	}
	name := fstype.Ext2
	switch {
	case incompat&^incompatExt3 != 0 || roCompat&^roCompatExt3 != 0:
		name = fstype.Ext4
	case compat&compatHasJournal != 0:
		name = fstype.Ext3
	}
	if logBlock > 6 || blocks == 0 || le.Uint32(sb[0:]) == 0 || le.Uint32(sb[0x20:]) == 0 {
		return damaged(name, "the magic is there, the rest makes no sense")
	}
	if roCompat&roCompatMetadataSum != 0 && ^crc32.Checksum(sb[:0x3fc], castagnoli) != le.Uint32(sb[0x3fc:]) {
		return damaged(name, "its checksum is wrong")
	}
	if incompat&incompatJournalDev != 0 {
		return known("ext-journal")
	}
	// A tenant could name any device of the node.
	inode, device := le.Uint32(sb[0xe0:]), le.Uint32(sb[0xe4:])
	options, _, _ := strings.Cut(string(sb[0x200:0x240]), "\x00")
	if compat&compatHasJournal != 0 && (inode == 0 || device != 0) || strings.Contains(options, "journal_dev") ||
		strings.Contains(options, "journal_path") {
		return Result{Type: name, Detail: name + " has its journal on another device"}, true
	}
	blockSize := int64(1024) << logBlock
	res := Result{
		Content: Known, Type: name, BlockSize: blockSize,
		UUID: uuid(sb[0x68:0x78]), Label: label(sb[0x78:0x88]),
	}
	if bits.Len64(blocks)+bits.Len64(uint64(blockSize)) > 63 {
		return damaged(name, "it claims 2^63 bytes or more")
	}
	res.Size = int64(blocks) * blockSize
	if res.Size > m.size {
		return damaged(name, "it spans %d bytes, the device has %d", res.Size, m.size)
	}
	const stateValid, stateErrors = 0x1, 0x2
	state := le.Uint16(sb[0x3a:])
	switch {
	case state&stateErrors != 0:
		res.NeedsCheck = "the kernel recorded errors in it"
	case state&stateValid == 0 && incompat&incompatRecover == 0:
		res.NeedsCheck = "it was not unmounted cleanly"
	}
	return res, true
}

// xfs: fs/xfs/libxfs/xfs_format.h, struct xfs_dsb.
func xfs(m *image) (Result, bool) {
	sb := m.at(0, 512)
	if sb == nil || string(sb[:4]) != "XFSB" {
		return Result{}, false
	}
	blockSize, blocks := int64(be.Uint32(sb[4:])), be.Uint64(sb[8:])
	sector := int64(be.Uint16(sb[102:]))
	if blockSize < 512 || blockSize > 65536 || bits.OnesCount64(uint64(blockSize)) != 1 || blocks == 0 ||
		sector < 512 || sector > 32768 || bits.OnesCount64(uint64(sector)) != 1 {
		return damaged(fstype.XFS, "the magic is there, the rest makes no sense")
	}
	if sb[126] != 0 {
		return damaged(fstype.XFS, "mkfs did not finish")
	}
	res := Result{Content: Known, Type: fstype.XFS, BlockSize: blockSize, UUID: uuid(sb[32:48]), Label: label(sb[108:120])}
	if be.Uint16(sb[100:])&0xf == 5 {
		whole := m.at(0, sector)
		if whole == nil {
			return damaged(fstype.XFS, "the device is shorter than its first sector")
		}
		c := crc32.Update(0, castagnoli, whole[:224])
		c = crc32.Update(c, castagnoli, make([]byte, 4))
		c = crc32.Update(c, castagnoli, whole[228:])
		if c != le.Uint32(sb[224:]) {
			return damaged(fstype.XFS, "its checksum is wrong")
		}
		const incompatNeedsRepair = 0x10
		if be.Uint32(sb[216:])&incompatNeedsRepair != 0 {
			res.NeedsCheck = "it is marked as needing repair"
		}
	}
	if bits.Len64(blocks)+bits.Len64(uint64(blockSize)) > 63 {
		return damaged(fstype.XFS, "it claims 2^63 bytes or more")
	}
	res.Size = int64(blocks) * blockSize
	if res.Size > m.size {
		return damaged(fstype.XFS, "it spans %d bytes, the device has %d", res.Size, m.size)
	}
	return res, true
}

// btrfs: fs/btrfs/ctree.h, struct btrfs_super_block.
func btrfs(m *image) (Result, bool) {
	sb := m.at(64<<10, 4096)
	if sb == nil {
		return Result{}, false
	}
	switch string(sb[64:72]) {
	case "_BHRfS_M":
	case "!BHRfS_M":
		return damaged(fstype.Btrfs, "mkfs did not finish")
	default:
		return Result{}, false
	}
	if le.Uint16(sb[196:]) == 0 { // csum_type crc32c
		if crc32.Checksum(sb[32:], castagnoli) != le.Uint32(sb) {
			return damaged(fstype.Btrfs, "its checksum is wrong")
		}
	}
	if devices := le.Uint64(sb[136:]); devices != 1 {
		return damaged(fstype.Btrfs, "it has %d devices; only file systems of one device are understood", devices)
	}
	total := le.Uint64(sb[112:])
	if total == 0 || bits.Len64(total) > 62 || int64(total) > m.size {
		return damaged(fstype.Btrfs, "it spans %d bytes, the device has %d", total, m.size)
	}
	sector := int64(le.Uint32(sb[144:]))
	if sector < 512 || sector > 65536 || bits.OnesCount64(uint64(sector)) != 1 {
		return damaged(fstype.Btrfs, "it has sectors of %d bytes", sector)
	}
	return Result{
		Content: Known, Type: fstype.Btrfs, Size: int64(total), BlockSize: sector,
		UUID: uuid(sb[32:48]), Label: label(sb[299 : 299+256]), Log: le.Uint64(sb[96:]) != 0,
	}, true
}

// f2fs: include/linux/f2fs_fs.h, struct f2fs_super_block. It has two copies, and the kernel uses the second one if the first is damaged.
func f2fs(m *image) (Result, bool) {
	const magic, size = "\x10\x20\xf5\xf2", 3072
	first, second := m.at(1024, size), m.at(4096+1024, size)
	if first == nil || second == nil {
		return Result{}, false
	}
	if string(first[:4]) != magic {
		if string(second[:4]) == magic {
			return damaged(fstype.F2FS, "only its copy is left")
		}
		return Result{}, false
	}
	const blockSizeLog, checksumAt, featureChecksum = 12, size - 4, 0x800
	blocks := le.Uint64(first[36:])
	if le.Uint32(first[16:]) != blockSizeLog || blocks == 0 {
		return damaged(fstype.F2FS, "the magic is there, the rest makes no sense")
	}
	if le.Uint32(first[2180:])&featureChecksum != 0 && (le.Uint32(first[32:]) != checksumAt ||
		^crc32.Update(^le.Uint32(first), crc32.IEEETable, first[:checksumAt]) != le.Uint32(first[checksumAt:])) {
		return damaged(fstype.F2FS, "its checksum is wrong")
	}
	// Paths of further devices: the kernel of whoever mounts this would open them.
	const devices = 2201
	if first[devices] != 0 || string(second[:4]) == magic && second[devices] != 0 {
		return damaged(fstype.F2FS, "it has several devices; only file systems of one device are understood")
	}
	if bits.Len64(blocks)+blockSizeLog > 63 || int64(blocks)<<blockSizeLog > m.size {
		return damaged(fstype.F2FS, "it spans %d blocks of 4096 bytes, the device has %d bytes", blocks, m.size)
	}
	res := Result{
		Content: Known, Type: fstype.F2FS, Size: int64(blocks) << blockSizeLog, BlockSize: 1 << blockSizeLog, UUID: uuid(first[108:124]),
		Label: utf16Label(first[124 : 124+1024]),
	}
	if nonZero(first[2762:2762+32+16]) >= 0 { // s_stop_reason, s_errors
		res.NeedsCheck = "the kernel recorded errors in it"
	}
	return res, true
}

func utf16Label(b []byte) string {
	var units []uint16
	for ; len(b) >= 2 && le.Uint16(b) != 0; b = b[2:] {
		units = append(units, le.Uint16(b))
	}
	return string(utf16.Decode(units))
}

func swap(m *image) (Result, bool) {
	for page := int64(4096); page <= 65536; page *= 2 {
		if m.has(page-10, "SWAPSPACE2") || m.has(page-10, "SWAP-SPACE") {
			return known("swap")
		}
	}
	return Result{}, false
}

func luks(m *image) (Result, bool) {
	if m.has(0, "LUKS\xba\xbe") {
		return known("luks")
	}
	// The secondary header of LUKS2. Its offset depends on the size of the primary header.
	for off := int64(0x4000); off < headSize; off *= 2 {
		if m.has(off, "SKUL\xba\xbe") {
			return damaged("luks", "only the secondary header is left")
		}
	}
	return Result{}, false
}

func lvm2(m *image) (Result, bool) {
	for sector := int64(0); sector < 4; sector++ {
		if m.has(sector*512, "LABELONE") {
			return known("lvm2")
		}
	}
	return Result{}, false
}

func md(m *image) (Result, bool) {
	const magic = "\xfc\x4e\x2b\xa9"
	for _, off := range []int64{
		0, 4096, // 1.1, 1.2
		(m.size/512 - 16) &^ 7 * 512, // 1.0
		m.size&^65535 - 65536,        // 0.90
	} {
		if m.has(off, magic) || m.has(off, "\xa9\x2b\x4e\xfc") {
			return known("md")
		}
	}
	return Result{}, false
}

func gpt(m *image) (Result, bool) {
	for _, sector := range []int64{512, 4096} {
		if m.has(sector, "EFI PART") {
			return known("gpt")
		}
		if m.has(m.size-sector, "EFI PART") {
			return damaged("gpt", "only the backup at the end is left")
		}
	}
	return Result{}, false
}

// bootSector detects formats that use the first sector, most with its 0x55aa.
func bootSector(m *image) (Result, bool) {
	b := m.at(0, 512)
	if b == nil {
		return Result{}, false
	}
	switch string(b[3:11]) {
	case "NTFS    ":
		return known(fstype.NTFS) // as the kernel's driver is called
	case "EXFAT   ":
		return known(fstype.Exfat)
	case "-FVE-FS-":
		return known("bitlocker")
	}
	if b[510] != 0x55 || b[511] != 0xaa {
		return Result{}, false
	}
	for _, off := range []int{54, 82} {
		if strings.HasPrefix(string(b[off:off+8]), "FAT") {
			return Result{Content: Known, Type: fstype.VFAT}, true
		}
	}
	if m.has(512, "EFI PART") || m.has(4096, "EFI PART") {
		return Result{}, false // the protective MBR of a GPT
	}
	used := false
	for i := range 4 {
		e := b[446+16*i:]
		if e[0]&0x7f != 0 {
			return damaged("mbr", "its partition table makes no sense")
		}
		used = used || e[4] != 0
	}
	if !used {
		return damaged("mbr", "a boot signature without partitions")
	}
	return known("mbr")
}

// zfs looks for an uberblock in the first and the last two of the four labels, in either byte
// order.
func zfs(m *image) (Result, bool) {
	const label, ring = 256 << 10, 128 << 10
	aligned := m.size &^ (label - 1)
	for _, base := range []int64{0, aligned - 2*label, aligned - label} {
		for off := base + ring; off < base+label; off += 1024 {
			if m.has(off, "\x0c\xb1\xba\x00\x00\x00\x00\x00") || m.has(off, "\x00\x00\x00\x00\x00\xba\xb1\x0c") {
				return known("zfs")
			}
		}
	}
	return Result{}, false
}
