package superblock

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Content is the answer of a probe.
type Content int

// The answers. The zero value is the safe one.
const (
	Unknown Content = iota
	Blank
	Known
)

func (a Content) String() string {
	switch a {
	case Blank:
		return "blank"
	case Known:
		return "known"
	default:
		return "unknown"
	}
}

// Result is the outcome of a probe.
type Result struct {
	Content Content
	// Type names a Known format: a file system by the name of its row in fstype, or swap, luks,
	// lvm2, md, gpt, mbr, zfs, bcache and a few more. For Unknown it may name the format that
	// the damaged data resembles.
	Type string
	// Detail describes, for Unknown, what was found and why it was rejected.
	Detail string

	UUID  string // as the file system's own tools print it; empty if none
	Label string

	// Size of the file system and of its blocks, in bytes, from the superblock. For those only
	// that can be made or grown.
	Size      int64
	BlockSize int64

	// NeedsCheck tells why the file system needs fsck before it is mounted; empty if it does
	// not. A journal to replay is no reason: the kernel does that.
	NeedsCheck string

	// Log means that what was synced last is only in a log, which the next mount replays. Only of those whose programs (fstype.NewID)
	// do not replay it.
	Log bool
}

func (r Result) String() string {
	switch r.Content {
	case Blank:
		return "blank"
	case Known:
		return r.Type
	default:
		return "unknown data: " + r.Detail
	}
}

const (
	headSize = 256 << 10 // primary signatures, first ZFS label
	closeBy  = 4 << 20   // everything before this offset is read
	tailSize = 512 << 10 // backups of GPT, MD 0.90/1.0, last ZFS labels
)

// image is the data available to a detector.
type image struct {
	head, tail []byte
	size       int64
}

// at returns n bytes at an offset from the start, or nil if the device is shorter or that part
// was not read.
func (m *image) at(off, n int64) []byte {
	if off < 0 || n < 0 || off+n > m.size {
		return nil
	}
	if off+n <= int64(len(m.head)) {
		return m.head[off : off+n]
	}
	if start := m.size - int64(len(m.tail)); off >= start {
		return m.tail[off-start : off-start+n]
	}
	return nil
}

func (m *image) has(off int64, magic string) bool {
	return string(m.at(off, int64(len(magic)))) == magic
}

// Probe examines a device of the given size in bytes. An error means that reading failed. Data
// that makes no sense is an Unknown, not an error.
func Probe(r io.ReaderAt, size int64) (Result, error) {
	if size <= 0 {
		return Result{Detail: "the device has no size"}, nil
	}
	m := &image{size: size}
	var err error
	if m.head, err = readFull(r, 0, min(size, headSize)); err != nil {
		return Result{}, err
	}
	if size > headSize {
		n := min(size-headSize, tailSize)
		if m.tail, err = readFull(r, size-n, n); err != nil {
			return Result{}, err
		}
	}
	found := detect(m)
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		detail, err := firstNonZero(r, m)
		if err != nil {
			return Result{}, err
		}
		if detail == "" {
			return Result{Content: Blank}, nil
		}
		return Result{Detail: detail}, nil
	}
	names := make([]string, len(found))
	for i, f := range found {
		names[i] = f.Type
	}
	return Result{Detail: "marks of more than one format: " + strings.Join(names, ", ")}, nil
}

func detect(m *image) []Result {
	var found []Result
	for _, f := range formats {
		if res, ok := f.detect(m); ok {
			found = append(found, res)
		}
	}
	return found
}

func readFull(r io.ReaderAt, off, n int64) ([]byte, error) {
	b := linux.AlignedBuffer(int(n))
	return b, readInto(r, b, off)
}

func readInto(r io.ReaderAt, b []byte, off int64) error {
	if got, err := r.ReadAt(b, off); got < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read %d bytes at offset %d: %w", len(b), off, err)
	}
	return nil
}

// firstNonZero examines everything that Blank promises, and describes where it found data.
// Besides head and tail, it reads the places of backup superblocks, so that a device whose
// first MiB was wiped is not blank, and samples over the whole device.
func firstNonZero(r io.ReaderAt, m *image) (string, error) {
	if off := nonZero(m.head); off >= 0 {
		return fmt.Sprintf("data that is no known format at offset %d", off), nil
	}
	if off := nonZero(m.tail); off >= 0 {
		return fmt.Sprintf("data that is no known format at offset %d", m.size-int64(len(m.tail))+int64(off)), nil
	}
	const step = 4096
	buf := linux.AlignedBuffer(headSize)
	// Read the part in which the copies are close together in large pieces.
	for off, end := int64(headSize), min(closeBy, m.size); off < end; off += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), end-off)]
		if err := readInto(r, b, off); err != nil {
			return "", err
		}
		if i := nonZero(b); i >= 0 {
			return fmt.Sprintf("no known format at the start, but data at offset %d (%s)", off+int64(i), nameBackup(b[i&^(step-1):])), nil
		}
	}
	for _, off := range backupPlaces(m.size) {
		b := buf[:min(step, m.size-off)]
		if err := readInto(r, b, off); err != nil {
			return "", err
		}
		if i := nonZero(b); i >= 0 {
			return fmt.Sprintf("no known format at the start, but data at offset %d (%s)", off+int64(i), nameBackup(b)), nil
		}
	}
	return "", nil
}

// nonZero returns where the first byte is that is not zero, or -1. It compares blocks, which is many times faster than a look at each
// byte.
func nonZero(b []byte) int {
	const block = 4096
	for from := 0; from < len(b); from += block {
		part := b[from:min(from+block, len(b))]
		if bytes.Equal(part, zeroBytes[:len(part)]) {
			continue
		}
		for i, c := range part {
			if c != 0 {
				return from + i
			}
		}
	}
	return -1
}
