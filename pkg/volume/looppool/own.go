package looppool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// The pool keeps a file, "reserve", that takes space and holds nothing. When a
// record cannot be written because volumes have filled the pool, a part of the
// reserve is given back, and the record takes its place. The reserve is filled
// up again when there is room.

const (
	defaultReserve = 64 << 20
	// smallestPart of a pool that is kept by default: one in that many bytes.
	smallestPart = 16
	// A piece of the reserve is given back at a time: a record takes a few KiB,
	// and its directory may need more.
	reservePiece = 1 << 20
)

type ownReserve struct {
	mu   sync.Mutex // held while the file is changed
	file *os.File
	size int64        // what is to be kept, a multiple of reservePiece; not changed after Open
	held atomic.Int64 // what is kept: the first bytes of the file
}

func (r *ownReserve) state() (size, held int64) { return r.size, r.held.Load() }

func (p *Pool) openReserve(size int64) error {
	c, err := p.space()
	if err != nil {
		return err
	}
	if size == 0 {
		size = min(defaultReserve, c.Total/smallestPart)
	}
	r := &p.reserved
	r.size = size &^ (reservePiece - 1)
	if r.file, err = os.OpenFile(filepath.Join(p.dir, "reserve"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		if !errors.Is(err, linux.ENOSPC) {
			return err
		}
		// Volumes filled the pool before it had a reserve. A file without a
		// name takes no room; the next start tries again.
		if r.file, err = linux.Memfd("reserve"); err != nil {
			return err
		}
		r.size = 0
		return nil
	}
	st, err := r.file.Stat()
	if err == nil && st.Size() > r.size { // it was larger
		err = linux.PunchHole(r.file, r.size, st.Size()-r.size)
	}
	if err == nil && st.Size() != r.size {
		err = r.file.Truncate(r.size)
	}
	if err == nil {
		first := r.size
		err = holes(r.file, r.size, true, func(h linux.Range) error { first = min(first, h.Start); return nil })
		r.held.Store(first &^ (reservePiece - 1))
	}
	if err != nil {
		return fmt.Errorf("the reserve for records: %w", errors.Join(err, r.file.Close()))
	}
	p.refillReserve()
	return nil
}

// refillReserve fills the reserve up, as far as there is room.
func (p *Pool) refillReserve() {
	r := &p.reserved
	if !r.mu.TryLock() {
		return // it is being filled, or given up
	}
	defer r.mu.Unlock()
	for r.held.Load() < r.size {
		// Volumes that are short of space come first: what they lose is lost.
		if c, err := p.space(); err != nil || c.Available < 2*reservePiece {
			return
		}
		if err := linux.Fallocate(r.file, r.held.Load(), reservePiece); err != nil {
			return
		}
		r.held.Add(reservePiece)
	}
}

// giveUpReserve makes room for records, and tells whether it did.
func (p *Pool) giveUpReserve() bool {
	r := &p.reserved
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held.Load() == 0 {
		return false
	}
	if err := linux.PunchHole(r.file, r.held.Load()-reservePiece, reservePiece); err != nil {
		p.log.Warn("the reserve for records cannot be given up", "error", err)
		return false
	}
	r.held.Add(-reservePiece)
	return true
}

// write writes a record. On a full pool, one that is needed takes a part of the reserve.
func (p *Pool) write(record func() error, needed bool) error {
	err := record()
	for needed && errors.Is(err, linux.ENOSPC) && p.giveUpReserve() {
		err = record()
	}
	return p.noSpace(err)
}
