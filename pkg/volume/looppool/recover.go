package looppool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// unfinished is what was being made when the last process stopped, and could not be
// undone yet. It is one copy's trouble, and not the pool's.
type unfinished struct {
	undoing sync.Mutex // held while something is undone, which may hang
	life    context.Context
	stop    func()

	mu sync.Mutex
	m  map[string]func() error // what undoes it, by key
}

func (p *Pool) load() error {
	err := loadAll(p, "volumes", volumeType, p.volumes, func(r *volumeRecord) (*string, *string) { return &r.Volume.ID, &r.State })
	err = errors.Join(err, loadAll(p, "snapshots", snapshotType, p.snapshots,
		func(r *snapshotRecord) (*string, *string) { return &r.Snapshot.ID, &r.State }))
	if err != nil {
		return err
	}
	p.followAll()
	return nil
}

// loadAll reads the records of one directory. One that cannot be used stays where
// it is, and so does its file: only the calls for that volume or snapshot fail.
func loadAll[R any](p *Pool, sub string, t record.Type, into map[string]R, parts func(*R) (id, state *string)) error {
	dir := filepath.Join(p.dir, sub)
	names, err := record.Names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		var r R
		path := filepath.Join(dir, name+record.Extension)
		err := t.Read(path, &r)
		id, state := parts(&r)
		_, key, _, ok := volume.ParseID(*id)
		if err == nil && (!ok || key != name || *state != creating && *state != ready && *state != deleting) {
			err = fmt.Errorf("%s: the record is of %q, state %q, and does not belong there", path, *id, *state)
		}
		if record.Untold(err) {
			return err // it says nothing about the record
		}
		if err != nil {
			p.bad[name] = record.Unusable(err)
			p.log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", p.bad[name])
			continue
		}
		// The pool may have got another name since.
		*id = p.name + "." + key
		into[key] = r
	}
	return nil
}

// Recover undoes what was being made when the last process stopped (nobody was
// told of it, so nobody misses it) and finishes what was being deleted. What cannot be undone now is tried
// again until the pool is closed.
func (p *Pool) Recover(thaw volume.Thaw) error {
	p.mu.Lock()
	volumes, snapshots := maps.Clone(p.volumes), maps.Clone(p.snapshots)
	p.mu.Unlock()
	if err := p.rememberAll(); err != nil {
		p.log.Warn("the devices of volumes are looked for one by one", "error", err)
	}
	left := map[string]func() error{}
	try := func(key, what string, undo func() error) {
		if err := undo(); err != nil {
			left[key] = undo
			p.log.Error("what was not finished is still there; it is tried again, and nothing else waits for it", "what", what, "error", err)
		}
	}
	for key, r := range volumes {
		switch r.State {
		case deleting:
			p.later("volume "+r.Volume.ID, p.destroy(key, r))
		case creating:
			rec, img := p.volumePath(key)
			try(key, "volume "+r.Volume.ID, func() error {
				return p.undo(thaw, r.Volume.SourceVolume, rec, func() error { return p.forgetVolume(key, rec, img) })
			})
		}
	}
	for key, r := range snapshots {
		rec, img := p.snapshotPath(key)
		switch r.State {
		case deleting:
			p.later("snapshot "+r.Snapshot.ID, p.forgetSnapshot(key, rec, img))
		case creating:
			try(key, "snapshot "+r.Snapshot.ID, func() error {
				return p.undo(thaw, r.Snapshot.Volume, rec, func() error { return p.forgetSnapshot(key, rec, img) })
			})
		}
	}
	if len(left) > 0 {
		p.left.mu.Lock()
		p.left.m = left
		p.left.mu.Unlock()
		go p.undoLater()
	}
	return nil
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

func (p *Pool) undoLater() {
	const pause = 10 * time.Second
	for {
		select {
		case <-p.left.life.Done():
			return
		case <-time.After(pause):
		}
		p.left.mu.Lock()
		left := maps.Clone(p.left.m)
		p.left.mu.Unlock()
		if len(left) == 0 {
			return
		}
		for key := range left {
			_ = p.finish(key) // it was said
		}
	}
}

// finish undoes what an earlier process has left of a key, so that it can be made or deleted
// now.
func (p *Pool) finish(key string) error {
	known := func() func() error {
		p.left.mu.Lock()
		defer p.left.mu.Unlock()
		return p.left.m[key]
	}
	if known() == nil {
		return nil
	}
	p.left.undoing.Lock()
	defer p.left.undoing.Unlock()
	undo := known()
	if undo == nil {
		return nil
	}
	if err := undo(); err != nil {
		return fault.New(fault.Busy, "it was not finished when the driver stopped, and cannot be undone yet: %w", err)
	}
	p.left.mu.Lock()
	delete(p.left.m, key)
	p.left.mu.Unlock()
	return nil
}

// Close releases the directory for another process. Attached devices stay.
func (p *Pool) Close() error {
	p.left.stop()
	return errors.Join(p.reserved.file.Close(), p.lock.Close())
}
