package mounter

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
)

// Identity says which disk a device is, or which part of one, whatever path or
// number it has. The zero value is that of a device that nobody has looked at.
type Identity struct {
	// Kind is where the kernel has it from: wwid, vpd, serial, cid, md, dm, file
	// (behind a loop device), or number: nothing but the device's number.
	Kind  string `json:"kind"`
	Value string `json:"value"`
	// Start and Length are a part of the disk, in bytes; a Length of 0 is its end.
	Start  int64 `json:"startBytes,omitempty"`
	Length int64 `json:"lengthBytes,omitempty"`
	// Boot is set when it holds for this boot only: after the next one, the same
	// number may be another disk.
	Boot string `json:"bootID,omitempty"`
}

// Known is false for the zero value.
func (i Identity) Known() bool { return i.Kind != "" }

// Lasting tells whether it still means the same disk after a reboot.
func (i Identity) Lasting() bool { return i.Known() && i.Boot == "" }

// Burnt tells whether the disk itself (or its volume manager) bears it: such a
// disk can be told from every other one. A file can be restored from a copy.
func (i Identity) Burnt() bool { return i.Lasting() && i.Kind != "file" }

// SameDisk tells whether both are known and are, or are parts of, one disk.
func (i Identity) SameDisk(o Identity) bool {
	return i.Known() && i.Kind == o.Kind && i.Value == o.Value && i.Boot == o.Boot
}

// Replaced tells whether what is there now is surely another disk. One whose number
// and size are all that is known of it may have grown.
func (i Identity) Replaced(now Identity) bool {
	switch {
	case i.SameDisk(now):
		return false
	case i.Burnt() && now.Burnt():
		return true
	}
	return i.Known() && i.Kind == now.Kind && !strings.HasSuffix(i.Value, sectors)
}

// Overlaps tells whether some byte belongs to both.
func (i Identity) Overlaps(o Identity) bool {
	return i.SameDisk(o) && (o.Length == 0 || i.Start < o.Start+o.Length) && (i.Length == 0 || o.Start < i.Start+i.Length)
}

func (i Identity) String() string {
	s := i.Kind + " " + i.Value
	if i.Start != 0 || i.Length != 0 {
		s += fmt.Sprintf(" from byte %d", i.Start)
	}
	return s
}

// Identify reads the identity of a device: the unique id that its hardware or
// its volume manager gives it, or, for a loop device, the file behind it (its
// device, inode and time of birth). Where there is none, it is the device's
// number and the kernel's sequence number of disks (Linux 5.15; its size before
// that), which holds for this boot only.
func Identify(d Device) (Identity, error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, err
	}
	return identities{sys: "/sys", dev: "/dev", boot: boot}.of(d.Path, d.Major, d.Minor, 0)
}

// identities are those of a machine; tests have one of their own.
type identities struct{ sys, dev, boot string }

func (m identities) of(path string, major, minor uint32, depth int) (Identity, error) {
	const deepest = 8 // loop devices on loop devices
	dir := fmt.Sprintf("%s/dev/block/%d:%d", m.sys, major, minor)
	to, err := os.Readlink(dir)
	if errors.Is(err, fs.ErrNotExist) || depth > deepest {
		said := &reading{dir: dir}
		return m.number(said, major, minor), said.short
	}
	if err != nil {
		return Identity{}, err
	}
	if !filepath.IsAbs(to) {
		to = filepath.Join(filepath.Dir(dir), to)
	}
	said := &reading{dir: to}
	id, err := m.said(said, path, major, minor, depth)
	return id, cmp.Or(said.short, err)
}

func (m identities) said(of *reading, path string, major, minor uint32, depth int) (Identity, error) {
	if of.read("partition") != "" {
		return m.partition(of, depth)
	}
	if uuid := of.read("dm/uuid"); uuid != "" {
		return Identity{Kind: "dm", Value: uuid}, nil
	}
	if of.read("loop/backing_file") != "" {
		id, err := m.loop(path, depth)
		if err != nil || id.Known() {
			return id, err
		}
		return m.number(of, major, minor), nil
	}
	for _, where := range []struct{ kind, file string }{{"wwid", "wwid"}, {"wwid", "device/wwid"}, {"md", "md/uuid"}, {"cid", "device/cid"}} {
		if id := of.read(where.file); id != "" {
			return Identity{Kind: where.kind, Value: id}, nil
		}
	}
	for _, page := range []string{"device/vpd_pg83", "device/vpd_pg80"} {
		b, err := os.ReadFile(filepath.Join(of.dir, page))
		if linux.Short(err) {
			return Identity{}, err
		}
		if err == nil && len(b) > 4 {
			sum := sha256.Sum256(b)
			return Identity{Kind: "vpd", Value: page[len(page)-2:] + " " + hex.EncodeToString(sum[:16])}, nil
		}
	}
	if serial := of.read("serial"); serial != "" { // virtio
		return Identity{Kind: "serial", Value: serial}, nil
	}
	return m.number(of, major, minor), nil
}

func (m identities) partition(of *reading, depth int) (Identity, error) {
	dir := of.dir
	const sector = 512 // of sysfs, whatever the disk's is
	start, err := strconv.ParseInt(of.read("start"), 10, 64)
	if err != nil {
		return Identity{}, fmt.Errorf("%s/start: %w", dir, err)
	}
	length, err := strconv.ParseInt(of.read("size"), 10, 64)
	if err != nil {
		return Identity{}, fmt.Errorf("%s/size: %w", dir, err)
	}
	whole := filepath.Dir(dir)
	var major, minor uint32
	disk := &reading{dir: whole}
	if _, err := fmt.Sscanf(disk.read("dev"), "%d:%d", &major, &minor); err != nil {
		return Identity{}, fmt.Errorf("%s/dev: %w", whole, cmp.Or(disk.short, err))
	}
	id, err := m.of(filepath.Join(m.dev, filepath.Base(whole)), major, minor, depth+1)
	return id.part(start*sector, length*sector), err
}

// part gives a part of what i is.
func (i Identity) part(start, length int64) Identity {
	if i.Length > 0 && (length == 0 || start+length > i.Length) {
		length = max(i.Length-start, 1)
	}
	i.Start, i.Length = i.Start+start, length
	return i
}

// loop looks behind a loop device; the zero value when nothing is to be seen
// there, or its file has no time of birth.
func (m identities) loop(path string, depth int) (Identity, error) {
	f, err := linux.Open(path, os.O_RDONLY)
	if linux.Short(err) {
		return Identity{}, err
	}
	if err != nil {
		return Identity{}, nil // no node of it here
	}
	defer f.Close()
	b, ok, err := loopdev.OpenBacking(f)
	if err != nil || !ok {
		return Identity{}, err
	}
	defer b.Close()
	if b.Block {
		link, err := os.Readlink(fmt.Sprintf("%s/dev/block/%d:%d", m.sys, b.Major, b.Minor))
		if err != nil {
			return Identity{}, err
		}
		id, err := m.of(filepath.Join(m.dev, filepath.Base(link)), b.Major, b.Minor, depth+1)
		return id.part(b.Offset, b.Limit), err
	}
	if b.File == nil {
		return Identity{}, nil
	}
	st, err := linux.StatxFile(b.File)
	if err != nil {
		return Identity{}, err
	}
	times, err := linux.FileTimes(b.File)
	if err != nil || times.Born == 0 {
		return Identity{}, err
	}
	return Identity{
		Kind: "file", Value: fmt.Sprintf("inode %d of device %d:%d, born %d", st.Ino, st.DevMajor, st.DevMinor, times.Born),
		Start: b.Offset, Length: b.Limit,
	}, nil
}

const sectors = " sectors" // ends what is known of a disk by its size

func (m identities) number(of *reading, major, minor uint32) Identity {
	value := fmt.Sprintf("%d:%d", major, minor)
	if seq := of.read("diskseq"); seq != "" {
		value += ", disk " + seq + " of this boot"
	} else {
		value += ", " + of.read("size") + sectors
	}
	return Identity{Kind: "number", Value: value, Boot: m.boot}
}

// reading is what is read of a device's directory in sysfs.
type reading struct {
	dir   string
	short error // a file could not be read, because this process lacked something; it may be there
}

// read gives a file without the space around it; empty when there is none.
// Bytes that are no text are written as Go writes them in strings: JSON, in which an
// identity is kept, has none.
func (r *reading) read(name string) string {
	if r.dir == "" {
		return ""
	}
	s, err := linux.ReadSmall(filepath.Join(r.dir, name))
	if linux.Short(err) {
		r.short = err
	}
	if err != nil {
		return ""
	}
	s = strings.Join(strings.Fields(strings.ReplaceAll(s, "\x00", " ")), " ")
	if !utf8.ValidString(s) {
		s = strconv.Quote(s)
	}
	return s
}
