package looppool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sort"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// CreateSnapshot copies a volume as it is now. The snapshot of a thick volume
// shares nothing with it: shared space would have to be had anew at the next
// write, which is what thick promises never to need.
func (p *Pool) CreateSnapshot(ctx context.Context, spec volume.SnapshotSpec, progress *volume.Progress) (volume.Snapshot, error) {
	vkey, v, err := p.find(spec.Volume)
	if err == nil {
		v, err = p.follow(vkey, v)
	}
	if err != nil {
		return volume.Snapshot{}, err
	}
	s := volume.Snapshot{
		ID: volume.SnapshotID(p.name, spec.Name), Name: spec.Name, Volume: spec.Volume, Size: v.Volume.Size,
		Created: time.Now().UTC(), FSType: v.Volume.FSType, Block: v.Volume.Block, Facts: v.Volume.Facts,
	}
	key, ok := p.key(s.ID, true)
	if !ok {
		return volume.Snapshot{}, fmt.Errorf("id %q does not name a snapshot of pool %s", s.ID, p.name)
	}
	if err := p.unusable(s.ID); err != nil {
		return volume.Snapshot{}, fmt.Errorf("snapshot %s: %w", s.ID, err)
	}
	rec, img := p.snapshotPath(key)
	if err := refuseTaken(p, p.snapshots, func(r snapshotRecord) string { return r.State }, key, img, "snapshot "+s.ID); err != nil {
		return volume.Snapshot{}, err
	}
	_, origin := p.volumePath(vkey)
	need, err := allocated(origin)
	if err != nil {
		return volume.Snapshot{}, err
	}
	if err := p.promise("snapshot "+spec.Name, key, 0, need); err != nil {
		return volume.Snapshot{}, err
	}
	defer p.unpromise(key)
	if err := p.saveSnapshot(key, snapshotRecord{creating, s}); err != nil {
		return volume.Snapshot{}, err
	}
	err = failpoint.Err("snapshot.recorded")
	if err == nil {
		err = p.fill(ctx, fillSpec{img: img, origin: origin, of: spec.Volume, size: s.Size, share: !v.Volume.Thick, quiesce: spec.Quiesce},
			progress)
	}
	if err == nil {
		err = p.saveSnapshot(key, snapshotRecord{ready, s})
	}
	if err != nil {
		return volume.Snapshot{}, errors.Join(p.noSpace(err), p.forgetSnapshot(key, rec, img))
	}
	return s, nil
}

func (p *Pool) saveSnapshot(key string, r snapshotRecord) error {
	path, _ := p.snapshotPath(key)
	if err := p.write(snapshotType, path, r, r.State != creating); err != nil {
		return err
	}
	p.mu.Lock()
	p.snapshots[key] = r
	p.mu.Unlock()
	return nil
}

func (p *Pool) forgetSnapshot(key, rec, img string) error {
	if err := errors.Join(removeFile(img), record.Remove(rec)); err != nil {
		return err
	}
	p.mu.Lock()
	delete(p.snapshots, key)
	p.mu.Unlock()
	p.refillReserve()
	return nil
}

// DeleteSnapshot destroys a snapshot. Volumes made from it are their own.
func (p *Pool) DeleteSnapshot(_ context.Context, id string) error {
	key, ok := p.key(id, true)
	if !ok {
		return nil
	}
	if err := p.unusable(id); err != nil {
		return fmt.Errorf("snapshot %s: %w", id, err)
	}
	p.mu.Lock()
	r, ok := p.snapshots[key]
	p.mu.Unlock()
	if !ok {
		return nil
	}
	r.State = deleting
	rec, img := p.snapshotPath(key)
	err := p.saveSnapshot(key, r)
	if fault.Is(err, fault.NoSpace) {
		if err := removeFile(img); err != nil {
			return err
		}
		err = p.saveSnapshot(key, r)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Err("snapshot.deleting"); err != nil {
		return err
	}
	return p.forgetSnapshot(key, rec, img)
}

// GetSnapshot gives a snapshot.
func (p *Pool) GetSnapshot(id string) (volume.Snapshot, error) {
	key, ok := p.key(id, true)
	var r snapshotRecord
	if ok {
		p.mu.Lock()
		r, ok = p.snapshots[key]
		p.mu.Unlock()
	}
	if err := p.unusable(id); err != nil {
		return volume.Snapshot{}, fmt.Errorf("snapshot %s: %w", id, err)
	}
	if !ok || r.State != ready {
		return volume.Snapshot{}, fault.New(fault.NotFound, "snapshot %s does not exist in pool %s", id, p.name)
	}
	return r.Snapshot, nil
}

// ListSnapshots gives all finished snapshots, by id.
func (p *Pool) ListSnapshots() []volume.Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]volume.Snapshot, 0, len(p.snapshots))
	for _, r := range p.snapshots {
		if r.State == ready {
			list = append(list, r.Snapshot)
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i].ID < list[j].ID })
	return list
}

// Recover undoes what was being made when the last process stopped (nobody was
// told of it, so nobody misses it) and finishes what was being deleted.
func (p *Pool) Recover(thaw volume.Thaw) error {
	p.mu.Lock()
	volumes, snapshots := maps.Clone(p.volumes), maps.Clone(p.snapshots)
	p.mu.Unlock()
	var errs []error
	if err := p.rememberAll(); err != nil {
		p.log.Warn("the devices of volumes are looked for one by one", "error", err)
	}
	for key, r := range volumes {
		switch r.State {
		case deleting:
			p.later("volume "+r.Volume.ID, p.destroy(key, r))
		case creating:
			rec, img := p.volumePath(key)
			errs = append(errs, p.undo(thaw, r.Volume.SourceVolume, rec, func() error { return p.forgetVolume(key, rec, img) }))
		}
	}
	for key, r := range snapshots {
		rec, img := p.snapshotPath(key)
		switch r.State {
		case deleting:
			p.later("snapshot "+r.Snapshot.ID, p.forgetSnapshot(key, rec, img))
		case creating:
			errs = append(errs, p.undo(thaw, r.Snapshot.Volume, rec, func() error { return p.forgetSnapshot(key, rec, img) }))
		}
	}
	return errors.Join(errs...)
}

// later logs that something is not deleted yet: a repeated delete goes on with it.
func (p *Pool) later(what string, err error) {
	if err != nil {
		p.log.Error("what was being deleted is still there; delete it again", "what", what, "error", err)
	}
}

func (p *Pool) undo(thaw volume.Thaw, origin, rec string, forget func() error) error {
	if origin != "" {
		if err := thaw(p, origin); err != nil {
			return fmt.Errorf("thaw %s: %w", origin, err)
		}
	}
	p.log.Info("undoing what was not finished", "record", rec)
	return forget()
}
