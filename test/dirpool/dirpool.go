// Package dirpool is a second small pool: each volume and each snapshot has its own directory. It
// shows the parts of a pool, and that the driver needs no more. It shares no extents and reserves
// nothing.
package dirpool

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// Pool keeps <key>.json and <key>/disk of each volume and snapshot.
type Pool struct {
	journal.Records

	name, dir string
	volumes   *journal.Book[journal.VolumeRecord]
	snapshots *journal.Book[journal.SnapshotRecord]
	loops     loopdev.Nodes
	raw       rawdevice.Guard

	promising sync.Mutex
	promises  map[string]int64 // of volumes and snapshots that are being made or enlarged, by key
}

var _ volume.Pool = (*Pool)(nil)

// Open opens a directory as a pool. It makes nodes of loop devices that /dev lacks in the directory
// nodes.
func Open(name, dir, nodes string, log *slog.Logger) (*Pool, error) {
	loops := loopdev.Nodes{Dir: nodes}
	p := &Pool{name: name, dir: dir, loops: loops, raw: rawdevice.Guard{Loops: loops}, promises: map[string]int64{}}
	o := journal.Options{Pool: name, Format: journal.Format{Kind: "directory-volume", Version: 1},
		Dir: filepath.Join(dir, "volumes"), Log: log}
	var err error
	if p.volumes, err = journal.OpenVolumes(o); err != nil {
		return nil, err
	}
	o.Format.Kind, o.Dir = "directory-snapshot", filepath.Join(dir, "snapshots")
	if p.snapshots, err = journal.OpenSnapshots(o); err != nil {
		return nil, err
	}
	p.Records = journal.NewRecords(p.volumes, p.snapshots)
	return p, nil
}

// Name, Close and Usable: nothing stays open.
func (p *Pool) Name() string  { return p.name }
func (p *Pool) Close() error  { return nil }
func (p *Pool) Usable() error { return loopdev.Available() }

// Sizes returns the sizes of files.
func (p *Pool) Sizes() volume.Sizes { return volume.FileSizes() }

func (p *Pool) volumeDisk(key string) string { return filepath.Join(p.volumes.Path(key, ""), "disk") }
func (p *Pool) snapshotDisk(key string) string {
	return filepath.Join(p.snapshots.Path(key, ""), "disk")
}

// Create makes a volume. A failure leaves nothing.
func (p *Pool) Create(ctx context.Context, spec volume.Spec, progress *volume.Progress) (volume.Volume, error) {
	v := volume.Volume{
		ID: volume.VolumeID(p.name, spec.Name), Name: spec.Name, Size: spec.Size, Created: time.Now().UTC(), Block: spec.Block,
		FSType:         spec.FSType,
		SourceSnapshot: spec.SourceSnapshot, SourceVolume: spec.SourceVolume, Parameters: maps.Clone(spec.Parameters),
	}
	if spec.Thick {
		return v, fault.New(fault.Invalid, "pool %s reserves nothing: leave provisioning=thick out", p.name)
	}
	if spec.SourceSnapshot == "" && spec.SourceVolume == "" {
		if err := p.Sizes().Refuse(spec.Size); err != nil {
			return v, err
		}
	}
	origin, err := p.origin(&v)
	if err != nil {
		return v, err
	}
	key, disk, err := place(p, p.volumes, v.ID)
	if err != nil {
		return v, err
	}
	free, err := p.promise(key, 0, v.Size)
	if err != nil {
		return v, err
	}
	defer free()
	if err := p.volumes.Put(key, journal.VolumeRecord{State: journal.Creating, Volume: v}); err != nil {
		return v, err
	}
	err = fill(ctx, disk, origin, v.Size, spec.Quiesce, progress)
	if err == nil {
		err = p.volumes.Put(key, journal.VolumeRecord{State: journal.Ready, Volume: v})
	}
	if err != nil {
		return v, errors.Join(err, forget(p.volumes, key))
	}
	return v, nil
}

// origin returns the file that a volume copies.
func (p *Pool) origin(v *volume.Volume) (disk string, err error) {
	var size int64
	switch {
	case v.SourceSnapshot != "":
		key, r, err := p.snapshots.Find(v.SourceSnapshot)
		if err != nil {
			return "", err
		}
		disk, size, v.Facts = p.snapshotDisk(key), r.Snapshot.Size, r.Snapshot.Facts
	case v.SourceVolume != "":
		key, r, err := p.volumes.Find(v.SourceVolume)
		if err != nil {
			return "", err
		}
		disk, size, v.Facts = p.volumeDisk(key), r.Volume.Size, r.Volume.Facts
	default:
		return "", nil
	}
	if v.Size < size {
		return "", fault.New(fault.OutOfRange, "a copy of %d bytes was asked for, its origin has %d", v.Size, size)
	}
	v.Facts.GrowDue = v.Facts.GrowDue || v.Size > size
	v.Facts.IdentityDue = true
	return disk, nil
}

// place returns where a new volume or snapshot goes. It fails if data is there.
func place[R any](p *Pool, book *journal.Book[R], id string) (key, disk string, err error) {
	key, _ = book.Key(id)
	dir := book.Path(key, "")
	_, err = os.Lstat(dir)
	return key, filepath.Join(dir, "disk"), book.Free(id, dir, !errors.Is(err, fs.ErrNotExist))
}

// fill makes a disk, durably. It overwrites what an earlier call left.
func fill(ctx context.Context, disk, origin string, size int64, quiesce volume.Quiesce, progress *volume.Progress) (err error) {
	if err := os.MkdirAll(filepath.Dir(disk), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(disk, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if origin != "" {
		if err := copyStill(ctx, f, origin, quiesce, progress); err != nil {
			return err
		}
	}
	return errors.Join(f.Truncate(size), f.Sync(), record.SyncDir(filepath.Dir(disk)), record.SyncDir(filepath.Dir(filepath.Dir(disk))))
}

func copyStill(ctx context.Context, f *os.File, origin string, quiesce volume.Quiesce, progress *volume.Progress) (err error) {
	if quiesce != nil {
		still, qerr := quiesce(ctx)
		if qerr != nil {
			return qerr
		}
		defer func() { err = errors.Join(err, still.Resume()) }()
		if still.Writers != "" {
			return fault.New(fault.State, "no copy of a volume that is written to: %s", still.Writers)
		}
	}
	from, err := os.Open(origin)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := from.Sync(); err != nil {
		return err
	}
	for {
		n, err := io.CopyN(f, from, 1<<20)
		progress.Add(n)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
	}
}

// forget removes the data and then the record.
func forget[R any](book *journal.Book[R], key string) error {
	dir := book.Path(key, "")
	for _, path := range []string{filepath.Join(dir, "disk"), dir} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return book.Forget(key)
}

// Delete destroys a volume that nobody uses.
func (p *Pool) Delete(ctx context.Context, id string) error {
	key, ok := p.volumes.Key(id)
	if !ok {
		return nil
	}
	r, ok := p.volumes.Look(key)
	if !ok {
		return p.volumes.Unusable(id)
	}
	if err := p.release(id, func(loopdev.Device) bool { return true }); err != nil {
		return err
	}
	r.State = journal.Deleting
	if err := p.volumes.Put(key, r); err != nil {
		return err
	}
	return forget(p.volumes, key)
}

// Expand enlarges the disk, then the record, then the devices.
func (p *Pool) Expand(ctx context.Context, id string, size int64) (volume.Volume, error) {
	key, r, err := p.volumes.Find(id)
	if err != nil {
		return volume.Volume{}, err
	}
	if size > r.Volume.Size {
		if err := p.Sizes().Refuse(size); err != nil {
			return volume.Volume{}, err
		}
		free, err := p.promise(key, r.Volume.Size, size)
		if err != nil {
			return volume.Volume{}, err
		}
		defer free()
		r.Volume.Size, r.Volume.Facts.GrowDue = size, true
		if err := lengthen(p.volumeDisk(key), size); err != nil {
			return volume.Volume{}, err
		}
		if err := p.volumes.Put(key, r); err != nil {
			return volume.Volume{}, err
		}
	}
	return r.Volume, p.Refresh(ctx, id)
}

func lengthen(disk string, size int64) error {
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	err = f.Truncate(size)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// CreateSnapshot copies a volume.
func (p *Pool) CreateSnapshot(ctx context.Context, spec volume.SnapshotSpec, progress *volume.Progress) (volume.Snapshot, error) {
	of, r, err := p.volumes.Find(spec.Volume)
	if err != nil {
		return volume.Snapshot{}, err
	}
	v := r.Volume
	s := volume.Snapshot{ID: volume.SnapshotID(p.name, spec.Name), Name: spec.Name, Volume: v.ID, Size: v.Size, Created: time.Now().UTC(),
		FSType: v.FSType, Block: v.Block, Facts: v.Facts}
	key, disk, err := place(p, p.snapshots, s.ID)
	if err != nil {
		return s, err
	}
	free, err := p.promise(key, 0, s.Size)
	if err != nil {
		return s, err
	}
	defer free()
	if err := p.snapshots.Put(key, journal.SnapshotRecord{State: journal.Creating, Snapshot: s}); err != nil {
		return s, err
	}
	err = fill(ctx, disk, p.volumeDisk(of), s.Size, spec.Quiesce, progress)
	if err == nil {
		err = p.snapshots.Put(key, journal.SnapshotRecord{State: journal.Ready, Snapshot: s})
	}
	if err != nil {
		return s, errors.Join(err, forget(p.snapshots, key))
	}
	return s, nil
}

// DeleteSnapshot destroys a snapshot.
func (p *Pool) DeleteSnapshot(_ context.Context, id string) error {
	key, ok := p.snapshots.Key(id)
	if !ok {
		return nil
	}
	r, ok := p.snapshots.Look(key)
	if !ok {
		return p.snapshots.Unusable(id)
	}
	r.State = journal.Deleting
	if err := p.snapshots.Put(key, r); err != nil {
		return err
	}
	return forget(p.snapshots, key)
}

// Recover undoes unfinished creations and finishes unfinished deletions.
func (p *Pool) Recover(thaw volume.Thaw) error {
	var errs []error
	for key, r := range p.volumes.All() {
		if r.State == journal.Creating && r.Volume.SourceVolume != "" {
			errs = append(errs, thaw(p, r.Volume.SourceVolume))
		}
		if r.State != journal.Ready {
			errs = append(errs, forget(p.volumes, key))
		}
	}
	for key, r := range p.snapshots.All() {
		if r.State == journal.Creating {
			errs = append(errs, thaw(p, r.Snapshot.Volume))
		}
		if r.State != journal.Ready {
			errs = append(errs, forget(p.snapshots, key))
		}
	}
	return errors.Join(errs...)
}

// Check looks for records without a disk.
func (p *Pool) Check() (found []volume.Finding, err error) {
	look := func(id, disk string) {
		if _, err := os.Lstat(disk); err != nil {
			found = append(found, volume.Finding{Kind: volume.RecordWithoutFile, ID: id, Path: disk, Means: err.Error(),
				Do: "restore it, or delete it"})
		}
	}
	for key, r := range p.volumes.All() {
		look(r.Volume.ID, p.volumeDisk(key))
	}
	for key, r := range p.snapshots.All() {
		look(r.Snapshot.ID, p.snapshotDisk(key))
	}
	return found, nil
}
