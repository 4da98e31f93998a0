package superblock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Read records how far ProveBlank has read. It is valid for one boot only: nobody can tell what
// happened to a device while another system ran.
type Read struct {
	// Witness changes if somebody writes to the device.
	Witness string `json:"witness"`
	Size    int64  `json:"sizeBytes"` // of the device
	Done    int64  `json:"doneBytes"` // bytes from its start that are all zero
}

// Reading holds the options of ProveBlank.
type Reading struct {
	// Before is the record of an earlier ProveBlank of this boot.
	Before Read
	// Begin, if not nil, is called with the start offset and the size, in bytes.
	Begin func(from, size int64)
	// Note, if not nil, stores the position. It is called every 64 MiB, and when the
	// reading ends early.
	Note func(Read) error
}

const (
	readSize  = 4 << 20
	noteEvery = 64 << 20
)

// zeroBytes takes no memory: the kernel has one page for all that nobody has written.
var zeroBytes [readSize]byte

// ProveBlank reads every byte of a device and bypasses the page cache. Only if all are zero,
// the answer is Blank, with a proof. It skips holes in the file behind a loop device, if that
// file can be opened and its identity is verified. It holds the device O_EXCL, so nobody can
// mount it or add it to a volume group meanwhile.
//
// It detects other writes by the kernel's count of writes to the device and by the last change
// of the file behind it. It does not detect writes to a disk below a loop device or a
// partition. If the device's statistics are disabled (queue/iostats), it does not detect writes
// to a part that it has already read.
func ProveBlank(ctx context.Context, path string, o Reading) (Result, BlankDevice, error) {
	d, err := openDevice(path, linux.OExcl)
	if errors.Is(err, linux.EBUSY) {
		err = fault.New(fault.State, "%s is in use, so that it cannot be proven blank", path)
	}
	if err != nil {
		return Result{}, BlankDevice{}, err
	}
	defer d.file.Close()
	if o.Begin == nil {
		o.Begin = func(int64, int64) {}
	}
	if o.Note == nil {
		o.Note = func(Read) error { return nil }
	}
	p := prover{device: d, Reading: o}
	defer func() { p.backing.Close() }()
	res, err := p.prove(ctx)
	if err != nil {
		return Result{}, BlankDevice{}, fmt.Errorf("%s: %w", path, err)
	}
	if res.Content != Blank {
		return res, BlankDevice{}, nil
	}
	return res, d.BlankDevice, nil
}

type prover struct {
	device
	Reading
	backing loopdev.Backing
	witness string
	buf     []byte
}

func (p *prover) prove(ctx context.Context) (Result, error) {
	// Write back the page cache, because the reads bypass it.
	if err := p.file.Sync(); err != nil {
		return Result{}, err
	}
	res, err := Probe(linux.Direct{File: p.file}, p.size)
	if err != nil || res.Content != Blank {
		return res, err
	}
	if p.backing, _, err = loopdev.OpenBacking(p.file); err != nil {
		return Result{}, err
	}
	if p.witness, err = p.look(); err != nil {
		return Result{}, err
	}
	var from int64
	if b := p.Before; p.witness != "" && b.Witness == p.witness && b.Size == p.size && b.Done <= p.size {
		from = b.Done
	}
	p.Begin(from, p.size)
	p.buf = linux.AlignedBuffer(readSize)
	found, err := p.read(ctx, from)
	if err != nil || found != "" {
		return Result{Detail: found}, err
	}
	if err := p.file.Sync(); err != nil {
		return Result{}, err
	}
	now, err := p.look()
	if err != nil {
		return Result{}, err
	}
	if now != p.witness {
		return Result{}, fault.New(fault.State, "somebody wrote to the device while it was being read to prove that it is blank; "+
			"it was not touched: find out who (`fuser -v %s`)", p.path)
	}
	return res, nil
}

// read describes where it found data; it returns "" if all bytes are zero.
func (p *prover) read(ctx context.Context, from int64) (string, error) {
	noted := from
	note := func(done int64) error {
		noted = done
		err := p.Note(Read{Witness: p.witness, Size: p.size, Done: done})
		failpoint.Hit("blank.read")
		return err
	}
	for pos := from; pos < p.size; {
		if err := ctx.Err(); err != nil {
			return "", errors.Join(fmt.Errorf("reading it to prove that it is blank was stopped: %w", context.Cause(ctx)), note(pos))
		}
		start, end, err := p.next(pos)
		if err != nil {
			return "", err
		}
		for pos = start; pos < end; {
			n := min(readSize, end-pos)
			if got, err := linux.Pread(p.file, p.buf[:n], pos); err != nil && (!errors.Is(err, io.EOF) || int64(got) < n) {
				return "", fault.New(fault.State, "it cannot be read at offset %d, so nobody knows what lies there; it was not touched: %w",
					pos+int64(got), err)
			}
			if !bytes.Equal(p.buf[:n], zeroBytes[:n]) {
				at := pos + int64(nonZero(p.buf[:n]))
				return fmt.Sprintf("no known format at the start, but data at offset %d (%s)", at, nameBackup(p.buf[at-pos:n])), note(pos)
			}
			pos += n
			if pos-noted >= noteEvery {
				break
			}
		}
		if pos-noted >= noteEvery {
			if err := note(pos); err != nil {
				return "", err
			}
		}
	}
	return "", note(p.size)
}

// next returns the next range, at or after pos, that must be read.
func (p *prover) next(pos int64) (start, end int64, err error) {
	if p.backing.File == nil {
		return pos, p.size, nil
	}
	start, end, done, err := linux.SeekData(p.backing.File, pos+p.backing.Offset)
	if done || err == nil && start-p.backing.Offset >= p.size {
		return p.size, p.size, nil
	}
	start = max(pos, (start-p.backing.Offset)&^(linux.DirectAlign-1))
	end = min(p.size, (end-p.backing.Offset+linux.DirectAlign-1)&^(linux.DirectAlign-1))
	return start, end, err
}

// look returns a text that changes if somebody writes to the device, within one boot. It is
// empty if the kernel does not count writes.
func (p *prover) look() (string, error) {
	dir := fmt.Sprintf("/sys/dev/block/%d:%d/", p.major, p.minor)
	whole := dir
	if _, err := os.Stat(dir + "partition"); err == nil {
		whole = dir + "../"
	}
	on, err := linux.ReadSmall(whole + "queue/iostats")
	if errors.Is(err, linux.ENOENT) || err == nil && strings.TrimSpace(on) != "1" {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	stat, err := linux.ReadSmall(dir + "stat")
	if err != nil {
		return "", err
	}
	// Documentation/block/stat.rst. Count sectors, not requests, because a flush is a write of
	// no sectors.
	f := strings.Fields(stat)
	if len(f) < 14 {
		return "", nil
	}
	seq, _ := linux.ReadSmall(whole + "diskseq") // Linux 5.15
	changed := int64(0)
	if p.backing.File != nil {
		t, err := linux.FileTimes(p.backing.File)
		if err != nil {
			return "", err
		}
		changed = t.Changed
	}
	return fmt.Sprintf("disk %s wrote %s discarded %s file changed %d", strings.TrimSpace(seq), f[6], f[13], changed), nil
}
