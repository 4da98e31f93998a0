// Package journal keeps what a pool knows of its volumes and snapshots, each in a record of its own. A record is
// written before the data is made and marked before it is destroyed, so that after a crash at any point all data
// can be accounted for. A record that cannot be used is kept, and only the calls for what it is of fail.
package journal

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// State is how far the making or the deletion of something has come.
type State string

// The states. Nobody was told of what is Creating.
const (
	Creating State = "creating"
	Ready    State = "ready"
	Deleting State = "deleting"
)

// Extension is how the name of a record's file ends.
const Extension = record.Extension

// VolumeRecord is a volume's.
type VolumeRecord struct {
	State  State         `json:"state"`
	Volume volume.Volume `json:"volume"`
}

// SnapshotRecord is a snapshot's.
type SnapshotRecord struct {
	State    State           `json:"state"`
	Snapshot volume.Snapshot `json:"snapshot"`
}

// Format is what the records of a kind of pool are called, and their version. Version 2 of a volume's has parameters.
type Format struct {
	Kind    string
	Version int
}

// ReadVolume reads one record of a pool, which nobody has to have open.
func ReadVolume(f Format, path string) (r VolumeRecord, err error) {
	err = record.Type(f).Read(path, &r)
	return r, err
}

// ReadSnapshot does that for a snapshot's.
func ReadSnapshot(f Format, path string) (r SnapshotRecord, err error) {
	err = record.Type(f).Read(path, &r)
	return r, err
}

// Options of OpenVolumes and OpenSnapshots.
type Options struct {
	Pool   string // its name
	Format Format
	Dir    string       // where the records are; it is made
	Log    *slog.Logger // nil for nobody
	// Write calls write, which writes a record, and may make room for it first. A record that is needed must be
	// written on a full pool too: without it, what is there could not be deleted. nil: write is called.
	Write func(write func() error, needed bool) error
}

// Book has the records of volumes, or of snapshots, by their keys: see volume.ParseID.
type Book[R any] struct {
	o         Options
	what      string // "volume"
	call      string // what makes and deletes one is called so
	snapshots bool
	kind      record.Type
	parts     func(*R) (id *string, state *State)

	mu       sync.Mutex // never held over input or output
	records  map[string]R
	unusable map[string]error // never changed after it was opened
}

// OpenVolumes reads the records of a pool's volumes.
func OpenVolumes(o Options) (*Book[VolumeRecord], error) {
	b := &Book[VolumeRecord]{o: o, what: "volume", call: "Volume", kind: record.Type(o.Format),
		parts: func(r *VolumeRecord) (*string, *State) { return &r.Volume.ID, &r.State }}
	return b, b.load()
}

// OpenSnapshots reads the records of its snapshots.
func OpenSnapshots(o Options) (*Book[SnapshotRecord], error) {
	b := &Book[SnapshotRecord]{o: o, what: "snapshot", call: "Snapshot", snapshots: true, kind: record.Type(o.Format),
		parts: func(r *SnapshotRecord) (*string, *State) { return &r.Snapshot.ID, &r.State }}
	return b, b.load()
}

func (b *Book[R]) load() error {
	b.o.Log = cmp.Or(b.o.Log, slog.New(slog.DiscardHandler))
	b.records, b.unusable = map[string]R{}, map[string]error{}
	if err := os.MkdirAll(b.o.Dir, 0o700); err != nil {
		return err
	}
	names, err := record.Names(b.o.Dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		var r R
		path := b.Path(name, Extension)
		err := b.kind.Read(path, &r)
		id, state := b.parts(&r)
		_, key, _, ok := volume.ParseID(*id)
		if err == nil && (!ok || key != name || *state != Creating && *state != Ready && *state != Deleting) {
			err = fmt.Errorf("%s: the record is of %q, state %q, and does not belong there", path, *id, *state)
		}
		if record.Untold(err) {
			return err // it says nothing about the record
		}
		if err != nil {
			b.unusable[name] = record.Unusable(err)
			b.o.Log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", b.unusable[name])
			continue
		}
		// The pool may have got another name since.
		*id = b.o.Pool + "." + key
		b.records[key] = r
	}
	return nil
}

// Path is the record's when the extension is Extension. A pool may keep other files beside it.
func (b *Book[R]) Path(key, extension string) string { return filepath.Join(b.o.Dir, key+extension) }

// Key takes an id apart; false for one of another pool, or of something else.
func (b *Book[R]) Key(id string) (string, bool) {
	pool, key, snapshot, ok := volume.ParseID(id)
	return key, ok && pool == b.o.Pool && snapshot == b.snapshots
}

// Unusable is the answer for what has a record that cannot be used, and nil for anything else.
func (b *Book[R]) Unusable(id string) error {
	key, ok := b.Key(id)
	if !ok || b.unusable[key] == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", b.what, id, b.unusable[key])
}

// Look gives a record, whatever its state.
func (b *Book[R]) Look(key string) (R, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok := b.records[key]
	return r, ok
}

// Has tells whether there is a record, be it one that cannot be used.
func (b *Book[R]) Has(key string) bool {
	_, ok := b.Look(key)
	return ok || b.unusable[key] != nil
}

// Find gives what is ready: else a fault NotFound, Busy while it is being deleted, or Unusable's answer. The key is
// empty if nothing has it.
func (b *Book[R]) Find(id string) (key string, r R, err error) {
	key, ok := b.Key(id)
	if ok {
		r, ok = b.Look(key)
	}
	_, state := b.parts(&r)
	switch {
	case !ok && b.Unusable(id) != nil:
		return key, r, b.Unusable(id)
	case !ok:
		return "", r, fault.New(fault.NotFound, "%s %s does not exist in pool %s", b.what, id, b.o.Pool)
	case *state == Deleting:
		return key, r, fault.New(fault.Busy, "%s %s is being deleted; if that does not end, repeat Delete%s", b.what, id, b.call)
	case *state == Creating:
		return key, r, fault.New(fault.NotFound, "%s %s is not finished; repeat Create%s", b.what, id, b.call)
	}
	return key, r, nil
}

// Free refuses to make what is there, or is being deleted, and what would lie where data is that no record tells
// of: it is somebody's. What a call that was cut short has left is made anew.
func (b *Book[R]) Free(id, data string, there bool) error {
	if err := b.Unusable(id); err != nil {
		return err
	}
	key, ok := b.Key(id)
	if !ok {
		return fmt.Errorf("id %q does not name a %s of pool %s", id, b.what, b.o.Pool)
	}
	r, ours := b.Look(key)
	_, state := b.parts(&r)
	switch {
	case ours && *state == Deleting:
		return fault.New(fault.Busy, "%s %s is being deleted; if that does not end, repeat the deletion", b.what, id)
	case ours && *state != Creating:
		return fault.New(fault.Exists, "%s %s is there already", b.what, id)
	case !ours && there:
		return fault.New(fault.State, "%s exists, and no record tells what it is: it may be a volume or a snapshot whose record was lost, "+
			"so it is not overwritten; put its record back, or move the file away", data)
	}
	return nil
}

// Ready gives what is ready, in the order of the keys.
func (b *Book[R]) Ready() []R {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]R, 0, len(b.records))
	for _, key := range slices.Sorted(maps.Keys(b.records)) {
		r := b.records[key]
		if _, state := b.parts(&r); *state == Ready {
			list = append(list, r)
		}
	}
	return list
}

// All gives all records that can be used.
func (b *Book[R]) All() map[string]R {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.records)
}

// Each hands f all of them. f must not call the book.
func (b *Book[R]) Each(f func(key string, r R)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, r := range b.records {
		f(key, r)
	}
}

// Put writes a record, durably. It is needed unless something is only to be made.
func (b *Book[R]) Put(key string, r R) error {
	_, state := b.parts(&r)
	return b.put(key, r, *state != Creating)
}

// PutIfRoom is Put of a record that is not needed.
func (b *Book[R]) PutIfRoom(key string, r R) error { return b.put(key, r, false) }

func (b *Book[R]) put(key string, r R, needed bool) error {
	write := func() error { return b.kind.Write(b.Path(key, Extension), r) }
	var err error
	if b.o.Write != nil {
		err = b.o.Write(write, needed)
	} else {
		err = write()
	}
	if err == nil {
		b.Note(key, r)
	}
	return err
}

// Note takes what the data itself says as well, so that it needs no record: it holds for this process.
func (b *Book[R]) Note(key string, r R) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records[key] = r
}

// Forget removes the record of what is gone.
func (b *Book[R]) Forget(key string) error {
	if err := record.Remove(b.Path(key, Extension)); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.records, key)
	return nil
}
