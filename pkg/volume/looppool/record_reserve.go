package looppool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// The pool keeps a file, "reserve", that takes space and has no content. If volumes have filled
// the pool and a record cannot be written, a part of the reserve is freed for the record. The
// reserve is filled up again when there is room.

const (
	defaultReserve = 64 << 20
	// smallestPart limits the default reserve to 1/smallestPart of the pool.
	smallestPart = 16
	// reservePiece is the part of the reserve that is freed at a time. A record takes a few
	// KiB, and its directory may need more.
	reservePiece = 1 << 20
)

type reserveFile struct {
	mu   sync.Mutex // held during changes of the file
	file *os.File
	size int64        // the target size, a multiple of reservePiece; not changed after Open
	held atomic.Int64 // the allocated bytes, at the start of the file
}

func (r *reserveFile) state() (size, held int64) { return r.size, r.held.Load() }

func (p *Pool) openReserve(size int64) error {
	c, err := p.space()
	if err != nil {
		return err
	}
	if size == 0 {
		size = min(defaultReserve, c.Total/smallestPart)
	}
	if most := c.Total - c.Total/forMaps; size >= most { // it would fill the disk, which others may use, too
		return fault.New(fault.Invalid, "a reserve of %d bytes leaves nothing to promise: %s is on a file system of %d; give a smaller one",
			size, p.dir, c.Total)
	}
	r := &p.reserved
	r.size = size &^ (reservePiece - 1)
	if r.file, err = os.OpenFile(filepath.Join(p.dir, "reserve"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		if !errors.Is(err, linux.ENOSPC) {
			return err
		}
		// Volumes filled the pool before it had a reserve. An anonymous file takes no room; the
		// next start tries again.
		if r.file, err = linux.Memfd("reserve"); err != nil {
			return err
		}
		r.size = 0
		return nil
	}
	st, err := r.file.Stat()
	if err == nil && st.Size() > r.size { // the reserve was larger before
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
	return nil // Recover fills it: which pools are beside this one is known then
}

// refillReserve fills the reserve up, as far as there is room that nobody was promised.
func (p *Pool) refillReserve() {
	held := p.reserved.held.Load()
	if missing := p.reserved.size - held; missing > 0 {
		p.fillReserve(held, p.spare(missing))
	}
}

// fillReserve adds to the reserve what was spare while it held that many bytes.
func (p *Pool) fillReserve(held, spare int64) {
	r := &p.reserved
	if !r.mu.TryLock() {
		return // somebody fills or frees it now
	}
	defer r.mu.Unlock()
	if r.held.Load() != held {
		return // somebody else took what was spare, or a record needed it
	}
	for ; r.held.Load() < r.size && spare >= reservePiece; spare -= reservePiece {
		if c, err := p.space(); err != nil || c.Available < 2*reservePiece {
			return
		}
		if err := linux.Fallocate(r.file, r.held.Load(), reservePiece); err != nil {
			return
		}
		r.held.Add(reservePiece)
	}
}

// giveUpReserve frees a part of the reserve for records, and reports whether it did.
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

// write writes a record. If the record is needed and the pool is full, it uses a part of the
// reserve.
func (p *Pool) write(record func() error, needed bool) error {
	err := record()
	for needed && errors.Is(err, linux.ENOSPC) && p.giveUpReserve() {
		err = record()
	}
	return p.noSpace(err)
}
