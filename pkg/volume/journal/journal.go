// Package journal stores what a pool knows of its volumes and snapshots, one record each. A
// record is written before the data is made, and marked before the data is destroyed. So all
// data can be accounted for after a crash at any point. An unusable record is kept, and only
// calls for its volume or snapshot fail.
package journal

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// State is the progress of the creation or deletion of an object.
type State string

// The states. No caller has been given an object that is Creating.
const (
	Creating State = "creating"
	Ready    State = "ready"
	Deleting State = "deleting"
)

// Extension is the extension of a record's file name.
const Extension = record.Extension

// VolumeRecord is the record of a volume.
type VolumeRecord struct {
	State  State         `json:"state"`
	Volume volume.Volume `json:"volume"`
}

// SnapshotRecord is the record of a snapshot.
type SnapshotRecord struct {
	State    State           `json:"state"`
	Snapshot volume.Snapshot `json:"snapshot"`
}

// Format is the kind and the version of the records of a pool. Version 2 of volume records
// added parameters.
type Format struct {
	Kind    string
	Version int
}

// ReadVolume reads one volume record of a pool. The pool need not be open.
func ReadVolume(f Format, path string) (r VolumeRecord, err error) {
	err = record.Type(f).Read(path, &r)
	return r, err
}

// ReadSnapshot reads one snapshot record of a pool.
func ReadSnapshot(f Format, path string) (r SnapshotRecord, err error) {
	err = record.Type(f).Read(path, &r)
	return r, err
}

// Options are the options of OpenVolumes and OpenSnapshots.
type Options struct {
	Pool   string // the pool's name
	Format Format
	Dir    string       // the directory of the records; created if missing
	Log    *slog.Logger // nil: no log
	// Write calls write, which writes a record. It may make room first. If needed is set, the
	// record must be written on a full pool too, because without it existing data could not be
	// deleted. nil: write is called directly.
	Write func(write func() error, needed bool) error
}

// Book holds the records of volumes, or of snapshots, by key: see volume.ParseID.
type Book[R any] struct {
	o         Options
	what      string // "volume"
	call      string // the suffix of the calls that create and delete one, as in CreateVolume
	snapshots bool
	kind      record.Type
	parts     func(*R) (id *string, state *State)
	origin    func(*R) (volume string, copy bool) // the volume that it was copied from, and whether it was copied from one

	mu       sync.Mutex // never held during I/O
	records  map[string]R
	unusable map[string]error // not changed after opening
}

// OpenVolumes reads the records of a pool's volumes.
func OpenVolumes(o Options) (*Book[VolumeRecord], error) {
	b := &Book[VolumeRecord]{o: o, what: "volume", call: "Volume", kind: record.Type(o.Format),
		parts:  func(r *VolumeRecord) (*string, *State) { return &r.Volume.ID, &r.State },
		origin: func(r *VolumeRecord) (string, bool) { return r.Volume.SourceVolume, r.Volume.SourceVolume != "" }}
	return b, b.load()
}

// OpenSnapshots reads the records of a pool's snapshots.
func OpenSnapshots(o Options) (*Book[SnapshotRecord], error) {
	b := &Book[SnapshotRecord]{o: o, what: "snapshot", call: "Snapshot", snapshots: true, kind: record.Type(o.Format),
		parts:  func(r *SnapshotRecord) (*string, *State) { return &r.Snapshot.ID, &r.State },
		origin: func(r *SnapshotRecord) (string, bool) { return r.Snapshot.Volume, true }}
	return b, b.load()
}

func (b *Book[R]) load() error {
	b.o.Log = cmp.Or(b.o.Log, slog.New(slog.DiscardHandler))
	b.records, b.unusable = map[string]R{}, map[string]error{}
	dir := record.Dir[R]{Path: b.o.Dir, Type: b.kind}
	return dir.Load(func(path string, r R, err error) error {
		name := strings.TrimSuffix(filepath.Base(path), Extension)
		id, state := b.parts(&r)
		_, key, _, ok := volume.ParseID(*id)
		if err == nil && (!ok || key != name || *state != Creating && *state != Ready && *state != Deleting) {
			err = fmt.Errorf("%s: %w: it is of %q, state %q", path, record.ErrMisplaced, *id, *state)
		}
		if err != nil {
			b.unusable[name] = record.Unusable(err)
			b.o.Log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", b.unusable[name])
			return nil
		}
		// The pool may have been renamed since.
		*id = b.o.Pool + "." + key
		b.records[key] = r
		return nil
	})
}

// Path returns the path of a record if the extension is Extension. A pool may keep other files
// beside it.
func (b *Book[R]) Path(key, extension string) string { return filepath.Join(b.o.Dir, key+extension) }

// Key returns the key of an id. It returns false for an id of another pool or kind, and for
// other text.
func (b *Book[R]) Key(id string) (string, bool) {
	pool, key, snapshot, ok := volume.ParseID(id)
	return key, ok && pool == b.o.Pool && snapshot == b.snapshots
}

// Unusable returns the error for an id whose record is unusable, and nil for any other id.
func (b *Book[R]) Unusable(id string) error {
	key, ok := b.Key(id)
	if !ok || b.unusable[key] == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", b.what, id, b.unusable[key])
}

// UnusableKeys lists the keys of the unusable records.
func (b *Book[R]) UnusableKeys() []string { return slices.Sorted(maps.Keys(b.unusable)) }

// Doubtful returns the keys of the volumes from which an unusable record may be an unfinished copy. all is true if some record does not say
// which volume. Both are guesses (see record.Hint).
func (b *Book[R]) Doubtful() (keys []string, all bool) {
	for name := range b.unusable {
		var r R
		if record.Hint(b.Path(name, Extension), &r) != nil {
			all = true
			continue
		}
		if _, state := b.parts(&r); *state == Ready || *state == Deleting {
			continue
		}
		origin, copied := b.origin(&r)
		if !copied {
			continue
		}
		_, key, _, ok := volume.ParseID(origin)
		all = all || !ok
		keys = append(keys, key)
	}
	return keys, all
}

// Look returns a record in any state.
func (b *Book[R]) Look(key string) (R, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok := b.records[key]
	return r, ok
}

// Has reports whether there is a record, usable or not.
func (b *Book[R]) Has(key string) bool {
	_, ok := b.Look(key)
	return ok || b.unusable[key] != nil
}

// Find returns a record that is Ready. Otherwise the error is a fault NotFound, a fault Busy
// during deletion, or that of Unusable. The key is empty if there is no record.
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

// Free checks that an object can be created. It refuses one that exists or is being deleted. If
// there is data (there) without a record, it refuses to overwrite it, because it belongs to
// somebody. An interrupted creation can be repeated.
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

// Ready returns the records that are Ready, in the order of their keys.
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

// All returns all usable records.
func (b *Book[R]) All() map[string]R {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.records)
}

// Each calls f with all usable records. f must not call the book.
func (b *Book[R]) Each(f func(key string, r R)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, r := range b.records {
		f(key, r)
	}
}

// Put writes a record, durably. The record is needed (see Options.Write) unless it is Creating.
func (b *Book[R]) Put(key string, r R) error {
	_, state := b.parts(&r)
	return b.put(key, r, *state != Creating)
}

// PutIfRoom is like Put for a record that is not needed.
func (b *Book[R]) PutIfRoom(key string, r R) error { return b.put(key, r, false) }

func (b *Book[R]) put(key string, r R, needed bool) error {
	write := func() error { return b.kind.Write(b.Path(key, Extension), r) }
	var err error
	if b.o.Write != nil {
		err = b.o.Write(write, needed)
	} else {
		err = write()
	}
	if err == nil || b.isDeleting(key, r) {
		b.Note(key, r)
	}
	return err
}

// isDeleting reports whether r, which is Deleting, is in the record's place although its writing failed, as when its directory could not be
// synced. The next process would go on with the deletion, so this one must not give the object to anybody.
func (b *Book[R]) isDeleting(key string, r R) bool {
	if _, state := b.parts(&r); *state != Deleting {
		return false
	}
	var there R
	err := b.kind.Read(b.Path(key, Extension), &there)
	_, state := b.parts(&there)
	return err == nil && *state == Deleting
}

// Note changes a record in memory only, for facts that the data itself shows too. The change is
// lost with this process.
func (b *Book[R]) Note(key string, r R) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records[key] = r
}

// Forget removes the record of an object that no longer exists.
func (b *Book[R]) Forget(key string) error {
	if err := record.Remove(b.Path(key, Extension)); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.records, key)
	return nil
}
