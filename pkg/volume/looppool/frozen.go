package looppool

import (
	"errors"

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
	copies []unfinished
	trying bool
}

// undo thaws the origin of a copy and removes the copy. If that fails, settle tries again.
func (p *Pool) undo(origin string, u unfinished) error {
	p.mu.Lock()
	f := p.frozen[origin]
	if f == nil {
		f = &frozen{}
		p.frozen[origin] = f
	}
	f.copies = append(f.copies, u)
	p.mu.Unlock()
	return p.thawOrigin(origin)
}

// settle thaws a volume that undo could not thaw, given that volume's id or that of the unfinished
// copy. Until then it is a fault Unavailable. No copy may be made before: it would be made
// beside a thaw, and so not be of one instant.
func (p *Pool) settle(origin, unfinishedCopy string) error {
	var origins []string
	p.mu.Lock()
	for id, f := range p.frozen {
		concerned := id == origin
		for _, u := range f.copies {
			concerned = concerned || u.id == unfinishedCopy
		}
		if concerned {
			origins = append(origins, id)
		}
	}
	p.mu.Unlock()
	var errs []error
	for _, id := range origins {
		errs = append(errs, p.thawOrigin(id))
	}
	return errors.Join(errs...)
}

func (p *Pool) thawOrigin(origin string) error {
	p.mu.Lock()
	f := p.frozen[origin]
	if f == nil {
		p.mu.Unlock()
		return nil
	}
	if f.trying { // a disk that hangs must not hold up more than one call
		p.mu.Unlock()
		return fault.New(fault.Unavailable, "volume %s may be frozen for a copy that was not finished; a thaw is being tried", origin)
	}
	f.trying = true
	copies, thaw := f.copies, p.thaw
	p.mu.Unlock()
	err := thaw(p, origin)
	if err != nil {
		err = fault.New(fault.Unavailable, "volume %s may be frozen for a copy that was not finished, and cannot be thawed: %w; "+
			"writes to it wait. Its health and each further copy try again. See the kernel's log (dmesg)", origin, err)
	}
	for _, u := range copies {
		if err == nil {
			p.log.Info("undoing what was not finished", "what", u.what)
			err = u.forget()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f.trying = false
	if err == nil && len(f.copies) == len(copies) {
		delete(p.frozen, origin)
	}
	return err
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
	return errors.Join(err, p.undo(origin, u))
}

// errNotResumed is the error of a copy whose origin may be frozen still.
var errNotResumed = errors.New("the volume could not be resumed")
