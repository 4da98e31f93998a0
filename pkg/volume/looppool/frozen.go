package looppool

import (
	"errors"
	"slices"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// unfinished is a copy whose origin may be frozen. Its record is the only thing that tells a
// later process so. It is therefore kept until the origin is thawed.
type unfinished struct {
	id, what string
	forget   func() error
}

// frozen is a volume that may be frozen, although no copy of it is being made.
type frozen struct {
	copies []unfinished // may be empty: the record of the copy cannot be used
	doubts int          // how many times the volume was noted as possibly frozen
	thawed bool         // only the copies are left
	trying bool
}

// thawPatience bounds how long Recover waits for all volumes that may be frozen: a disk may hang.
const thawPatience = 10 * time.Second

// mayBeFrozen notes that the origin of unfinished copies may be frozen.
func (p *Pool) mayBeFrozen(origin string, copies ...unfinished) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.frozen[origin]
	if f == nil {
		f = &frozen{}
		p.frozen[origin] = f
	}
	f.thawed = false
	f.doubts++
	f.copies = append(f.copies, copies...)
}

// settle thaws a volume that may be frozen and removes what is left of its copies, given that volume's id or that of an unfinished
// copy. It is a fault Unavailable if the volume cannot be thawed, or the copy not be removed. No copy may be made before: it would be
// made beside a thaw, and so not be of one instant.
func (p *Pool) settle(origin, unfinishedCopy string) error {
	type found struct {
		id     string
		ofCopy bool
	}
	var concerned []found
	p.mu.Lock()
	for id, f := range p.frozen {
		ofCopy := slices.ContainsFunc(f.copies, func(u unfinished) bool { return u.id == unfinishedCopy })
		if ofCopy || id == origin {
			concerned = append(concerned, found{id, ofCopy})
		}
	}
	p.mu.Unlock()
	var errs []error
	for _, c := range concerned {
		thawed, err := p.thawOrigin(c.id)
		if err != nil && (c.ofCopy || !thawed) {
			errs = append(errs, err)
		} else if err != nil {
			p.log.Warn("what is left of a copy that was not finished is still there", "volume_id", c.id, "error", err)
		}
	}
	return errors.Join(errs...)
}

// thawOrigin thaws a volume, unless that is done, and removes its unfinished copies.
func (p *Pool) thawOrigin(origin string) (thawed bool, err error) {
	p.mu.Lock()
	f := p.frozen[origin]
	if f == nil {
		p.mu.Unlock()
		return true, nil
	}
	if f.trying { // a disk that hangs must not hold up more than one call
		defer p.mu.Unlock()
		return f.thawed, fault.New(fault.Unavailable, "volume %s may be frozen for a copy that was not finished; a thaw is being tried", origin)
	}
	f.trying = true
	copies, thaw, doubts, before := f.copies, p.thaw, f.doubts, f.thawed
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		f.trying = false
		if len(f.copies) == 0 && f.thawed {
			delete(p.frozen, origin)
		}
	}()
	if !before {
		if err := thaw(p, origin); err != nil {
			return false, fault.New(fault.Unavailable, "volume %s may be frozen for a copy that was not finished, and cannot be thawed: %w; "+
				"writes to it wait. Its health and each further copy try again. See the kernel's log (dmesg)", origin, err)
		}
		p.mu.Lock()
		f.thawed = f.doubts == doubts // another copy may have frozen it since
		p.mu.Unlock()
	}
	var errs []error
	for _, u := range copies {
		p.log.Info("undoing what was not finished", "what", u.what)
		if err := u.forget(); err != nil {
			errs = append(errs, fault.New(fault.Unavailable, "%s was not finished and cannot be removed: %w", u.what, err))
			continue
		}
		p.mu.Lock()
		f.copies = slices.DeleteFunc(slices.Clone(f.copies), func(left unfinished) bool { return left.id == u.id })
		p.mu.Unlock()
	}
	p.mu.Lock()
	thawed = f.thawed
	p.mu.Unlock()
	if !thawed {
		errs = append(errs, fault.New(fault.Unavailable, "volume %s may be frozen again, for another copy that was not finished", origin))
	}
	return thawed, errors.Join(errs...)
}

// recoverFrozen thaws the volumes that an earlier process may have left frozen. One that does not answer is left to settle.
func (p *Pool) recoverFrozen() {
	p.mu.Lock()
	origins := make([]string, 0, len(p.frozen))
	for id := range p.frozen {
		origins = append(origins, id)
	}
	p.mu.Unlock()
	late := time.After(p.thawPatience)
	for _, id := range origins {
		done := make(chan error, 1)
		go func() {
			_, err := p.thawOrigin(id)
			done <- err
		}()
		select {
		case err := <-done:
			if err != nil {
				p.log.Error("what was not finished is still there", "volume_id", id, "error", err)
			}
		case <-late:
			p.log.Error("a volume that may be frozen does not answer; everything else goes on without it", "volume_id", id)
			late = time.After(0)
		}
	}
}

func (p *Pool) unfinishedVolume(key string, v volume.Volume) unfinished {
	return unfinished{v.ID, "volume " + v.ID, func() error { return p.forgetVolume(key) }}
}

func (p *Pool) unfinishedSnapshot(key string, s volume.Snapshot) unfinished {
	return unfinished{s.ID, "snapshot " + s.ID, func() error { return p.forgetSnapshot(key) }}
}

// failed removes a copy that was not finished. If its origin could not be resumed, that comes first.
func (p *Pool) failed(err error, origin string, u unfinished) error {
	if !errors.Is(err, errNotResumed) {
		return errors.Join(err, u.forget())
	}
	p.mayBeFrozen(origin, u)
	_, uerr := p.thawOrigin(origin)
	return errors.Join(err, uerr)
}

// errNotResumed is the error of a copy whose origin may be frozen still.
var errNotResumed = errors.New("the volume could not be resumed")
