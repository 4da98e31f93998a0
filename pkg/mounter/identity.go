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

// Identity identifies a disk, or a part of one, independently of its path and number. The zero
// value means that the device has not been examined.
type Identity struct {
	// Kind is the source of Value: wwid, vpd, serial, cid, md, dm, file (behind a loop device),
	// or number (nothing but the device's number).
	Kind  string `json:"kind"`
	Value string `json:"value"`
	// Start and Length delimit a part of the disk, in bytes. A Length of 0 reaches to its end.
	Start  int64 `json:"startBytes,omitempty"`
	Length int64 `json:"lengthBytes,omitempty"`
	// Boot is set if the identity is valid for this boot only: after the next one, the same
	// number may be another disk.
	Boot string `json:"bootID,omitempty"`
}

// Known is false for the zero value.
func (i Identity) Known() bool { return i.Kind != "" }

// Lasting reports whether the identity still means the same disk after a reboot.
func (i Identity) Lasting() bool { return i.Known() && i.Boot == "" }

// Burnt reports whether the disk itself (or its volume manager) carries the identity, so that
// it distinguishes the disk from every other. A file does not qualify: it can be restored from
// a copy.
func (i Identity) Burnt() bool { return i.Lasting() && i.Kind != "file" }

// SameDisk reports whether both are known and are, or are parts of, one disk.
func (i Identity) SameDisk(o Identity) bool {
	return i.Known() && i.Kind == o.Kind && i.Value == o.Value && i.Boot == o.Boot
}

// Replaced reports whether the disk there now is certainly another one. It is false if only the
// number and the size of the disk are known: the disk may have grown.
func (i Identity) Replaced(now Identity) bool {
	switch {
	case i.SameDisk(now):
		return false
	case i.Burnt() && now.Burnt():
		return true
	}
	return i.Known() && i.Kind == now.Kind && !strings.HasSuffix(i.Value, sectors)
}

// Overlaps reports whether the two share a byte.
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

// Identify reads the identity of a device. It is the unique id from its hardware or volume
// manager or, for a loop device, the file behind it (its device, inode and birth time). If
// there is none, it is the device's number and the kernel's disk sequence number (Linux 5.15;
// before that, the size), valid for this boot only. Of a device that this machine does not have,
// such as one that was pulled, it is the number alone, and no error.
func Identify(d Device) (Identity, error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, err
	}
	return identities{sys: "/sys", dev: "/dev", boot: boot}.of(d.Path, d.Major, d.Minor, 0)
}

// identities reads the identities of a machine. Tests use directories of their own.
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
	id, err := m.reported(said, path, major, minor, depth)
	return id, cmp.Or(said.short, err)
}

func (m identities) reported(of *reading, path string, major, minor uint32, depth int) (Identity, error) {
	if of.read("partition") != "" {
		return m.partition(of, depth)
	}
	if uuid := of.read("dm/uuid"); uuid != "" {
		return Identity{Kind: "dm", Value: uuid}, nil
	}
	if of.read("loop/backing_file") != "" {
		id, err := m.loop(path, major, minor, depth)
		if err != nil || id.Known() {
			return id, err
		}
		return m.number(of, major, minor), nil
	}
	for _, where := range []struct{ kind, file string }{
		{"wwid", "wwid"}, {"wwid", "device/wwid"}, {"md", "md/uuid"}, {"cid", "device/cid"},
	} {
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
	const sector = 512 // sysfs counts in 512 bytes, whatever the disk's sector size
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

// part returns a part of i. Start and length are in bytes, relative to i.
func (i Identity) part(start, length int64) Identity {
	if i.Length > 0 && (length == 0 || start+length > i.Length) {
		length = max(i.Length-start, 1)
	}
	i.Start, i.Length = i.Start+start, length
	return i
}

// loop identifies what is behind a loop device. It returns the zero value if that is not
// visible, or if the file has no birth time.
func (m identities) loop(path string, major, minor uint32, depth int) (Identity, error) {
	f, err := linux.Open(path, os.O_RDONLY)
	if linux.Short(err) {
		return Identity{}, err
	}
	if err != nil {
		return Identity{}, nil // no node here
	}
	defer f.Close()
	st, err := linux.StatxFile(f)
	if err != nil || st.RdevMajor != major || st.RdevMinor != minor {
		return Identity{}, err // the path leads to another device by now
	}
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
	if st, err = linux.StatxFile(b.File); err != nil {
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

const sectors = " sectors" // ends the Value of a disk that is known only by its number and size

func (m identities) number(of *reading, major, minor uint32) Identity {
	value := fmt.Sprintf("%d:%d", major, minor)
	if seq := of.read("diskseq"); seq != "" {
		value += ", disk " + seq + " of this boot"
	} else {
		value += ", " + of.read("size") + sectors
	}
	return Identity{Kind: "number", Value: value, Boot: m.boot}
}

// reading reads files of a device's directory in sysfs.
type reading struct {
	dir   string
	short error // a file could not be read for lack of a resource; it may exist
}

// read returns the content of a file without surrounding space, or "" if there is none. Content
// that is not UTF-8 is quoted as a Go string, because identities are stored as JSON.
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
