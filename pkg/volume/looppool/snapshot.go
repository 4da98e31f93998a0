package looppool

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// CreateSnapshot copies a volume's current content. The snapshot of a thick volume shares no
// space with it: the next write to shared space would have to allocate, and a thick volume must
// never need that.
func (p *Pool) CreateSnapshot(ctx context.Context, spec volume.SnapshotSpec, progress *volume.Progress) (volume.Snapshot, error) {
	if err := p.settle(spec.Volume, volume.SnapshotID(p.name, spec.Name)); err != nil {
		return volume.Snapshot{}, err
	}
	vkey, v, err := p.volumes.Find(spec.Volume)
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
	key, ok := p.snapshots.Key(s.ID)
	if !ok {
		return volume.Snapshot{}, fmt.Errorf("id %q does not name a snapshot of pool %s", s.ID, p.name)
	}
	img := p.snapshotPath(key)
	if err := p.snapshots.Free(s.ID, img, exists(img)); err != nil {
		return volume.Snapshot{}, err
	}
	origin := p.volumePath(vkey)
	need, err := allocated(origin)
	if err != nil {
		return volume.Snapshot{}, err
	}
	if err := p.promise("snapshot "+spec.Name, key, 0, need); err != nil {
		return volume.Snapshot{}, err
	}
	defer p.unpromise(key)
	if err := p.snapshots.Put(key, journal.SnapshotRecord{State: journal.Creating, Snapshot: s}); err != nil {
		return volume.Snapshot{}, err
	}
	err = failpoint.Err("snapshot.recorded")
	if err == nil {
		err = p.fill(ctx, fillSpec{img: img, origin: origin, of: spec.Volume, size: s.Size, share: !v.Volume.Thick, quiesce: spec.Quiesce},
			progress)
	}
	if err == nil {
		err = p.promiseFilled(spec.Name, key, need)
	}
	if err == nil {
		err = p.snapshots.Put(key, journal.SnapshotRecord{State: journal.Ready, Snapshot: s})
	}
	if err != nil {
		return volume.Snapshot{}, p.failed(p.noSpace(err), spec.Volume, p.unfinishedSnapshot(key, s))
	}
	return s, nil
}

// promiseFilled promises what a snapshot has beyond the expected bytes. Its volume can have grown
// since: what a pod wrote into the page cache reaches the file only when the volume is quiesced.
func (p *Pool) promiseFilled(name, key string, expected int64) error {
	has, err := allocated(p.snapshotPath(key))
	if err != nil || has <= expected {
		return err
	}
	return p.promise("snapshot "+name, key, expected, has)
}

func (p *Pool) forgetSnapshot(key string) error {
	if err := removeFile(p.snapshotPath(key)); err != nil {
		return err
	}
	if err := p.snapshots.Forget(key); err != nil {
		return err
	}
	p.refillReserve()
	return nil
}

// DeleteSnapshot destroys a snapshot. Volumes made from it are independent of it.
func (p *Pool) DeleteSnapshot(_ context.Context, id string) error {
	key, ok := p.snapshots.Key(id)
	if !ok {
		return nil
	}
	if err := p.snapshots.Unusable(id); err != nil {
		return err
	}
	if err := p.settle("", id); err != nil {
		return err
	}
	r, ok := p.snapshots.Look(key)
	if !ok {
		return nil
	}
	r.State = journal.Deleting
	err := p.snapshots.Put(key, r)
	if fault.Is(err, fault.NoSpace) {
		if err := removeFile(p.snapshotPath(key)); err != nil {
			return err
		}
		err = p.snapshots.Put(key, r)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Err("snapshot.deleting"); err != nil {
		return err
	}
	return p.forgetSnapshot(key)
}

// Recover removes what the last process left unfinished (no caller has been given it) and
// completes deletions. A volume that cannot be thawed keeps its unfinished copies, and everything
// else goes on: Health tells of it and tries again.
func (p *Pool) Recover(thaw volume.Thaw) error {
	p.mu.Lock()
	p.thaw = thaw
	p.mu.Unlock()
	undo := func(origin string, u unfinished) {
		if origin == "" {
			p.log.Info("undoing what was not finished", "what", u.what)
			p.later(u.what, u.forget())
			return
		}
		if _, key, _, ok := volume.ParseID(origin); ok {
			origin = p.name + "." + key // the record has the pool's name of then
		}
		p.mayBeFrozen(origin, u)
	}
	if err := p.rememberAll(); err != nil {
		p.log.Warn("the devices of volumes are looked for one by one", "error", err)
	}
	for key, r := range p.volumes.All() {
		switch r.State {
		case journal.Deleting:
			p.later("volume "+r.Volume.ID, p.destroy(key, r))
		case journal.Creating:
			undo(r.Volume.SourceVolume, p.unfinishedVolume(key, r.Volume))
		}
	}
	for key, r := range p.snapshots.All() {
		switch r.State {
		case journal.Deleting:
			p.later("snapshot "+r.Snapshot.ID, p.forgetSnapshot(key))
		case journal.Creating:
			undo(r.Snapshot.Volume, p.unfinishedSnapshot(key, r.Snapshot))
		}
	}
	p.doubt()
	p.recoverFrozen()
	p.refillReserve()
	return nil
}

// doubt notes the volumes that may be frozen for a copy whose record cannot be used. That record stays.
func (p *Pool) doubt() {
	keys, all := p.volumes.Doubtful()
	more, allOfSnapshots := p.snapshots.Doubtful()
	keys = append(keys, more...)
	if all || allOfSnapshots {
		keys = append(slices.Collect(maps.Keys(p.volumes.All())), p.volumes.UnusableKeys()...)
	}
	for _, key := range keys {
		p.mayBeFrozen(p.name + "." + key)
	}
}

// later logs that something could not be removed. Repeating the call that failed tries again.
func (p *Pool) later(what string, err error) {
	if err != nil {
		p.log.Error("what was not finished, or was being deleted, cannot be removed yet; create or delete it again", "what", what, "error", err)
	}
}
