package looppool

import (
	"context"
	"errors"
	"io/fs"
	"os"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// The size of a volume is the size of its file. The record follows: after a crash, a file may
// be larger than its record says, and devices and file systems may have grown into it since. No
// file is ever truncated to a smaller size.

// follow sets the size in a volume's record to that of its file. A file that is shorter than
// its record has lost data: that is a fault State.
func (p *Pool) follow(key string, r journal.VolumeRecord) (journal.VolumeRecord, error) {
	img := p.volumePath(key)
	st, err := os.Lstat(img)
	if errors.Is(err, fs.ErrNotExist) {
		return r, gone(r.Volume.ID, img)
	}
	if err != nil {
		return r, err
	}
	if st.Size() < r.Volume.Size {
		return r, short("volume "+r.Volume.ID, img, st.Size(), r.Volume.Size)
	}
	if st.Size() > r.Volume.Size {
		r.Volume.Size = st.Size()
		r.Volume.Facts.GrowDue = true
		p.keepVolume(key, r)
	}
	return r, nil
}

// followAll calls follow for everything in the pool. It ignores errors, because they recur when
// the volume is used.
func (p *Pool) followAll() {
	for key, r := range p.volumes.All() {
		if r.State == journal.Ready {
			_, _ = p.follow(key, r)
		}
	}
	for key, r := range p.snapshots.All() {
		if st, err := os.Lstat(p.snapshotPath(key)); err == nil && r.State == journal.Ready && st.Size() > r.Snapshot.Size {
			r.Snapshot.Size = st.Size()
			p.snapshots.Note(key, r)
		}
	}
}

// keepVolume is like Put for facts that the file shows too. If the record cannot be written,
// the change holds for this process, and the next one finds it again.
func (p *Pool) keepVolume(key string, r journal.VolumeRecord) {
	if err := p.volumes.Put(key, r); err != nil {
		p.log.Warn("a volume's record could not be written; its file says the same",
			"volume_id", r.Volume.ID, "size", r.Volume.Size, "error", err)
		p.volumes.Note(key, r)
	}
}

func gone(id, img string) error {
	return fault.New(fault.State, "volume %s: its file %s is gone; restore it from a backup, or delete the volume", id, img)
}

func short(what, img string, have, want int64) error {
	return fault.New(fault.State, "%s: its file %s has %d bytes and is shorter than the %d that were written down: "+
		"somebody truncated it, and what lay behind its end is lost; restore a snapshot or a backup, or delete it", what, img, have, want)
}

// wholeOrigin refuses to copy a file that is shorter than its record, or larger than the copy
// would be.
func wholeOrigin(img string, size, copySize int64) error {
	st, err := os.Lstat(img)
	if err != nil {
		return fault.New(fault.State, "the origin of the copy cannot be read: %w", err)
	}
	if st.Size() < size {
		return short("the origin of the copy", img, st.Size(), size)
	}
	if st.Size() > copySize {
		return fault.New(fault.State, "%s has %d bytes, and a copy of %d would be shorter", img, st.Size(), copySize)
	}
	return nil
}

// lengthen extends a file to that size. A larger file is a fault and is not truncated.
func lengthen(f *os.File, size int64) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() > size {
		return fault.New(fault.State, "%s has %d bytes and would be cut to %d", f.Name(), st.Size(), size)
	}
	return f.Truncate(size)
}

// Expand grows the volume and its devices. Steps that can fail for lack of space come first: if
// they fail, nothing has changed.
func (p *Pool) Expand(ctx context.Context, id string, size int64) (volume.Volume, error) {
	key, r, err := p.volumes.Find(id)
	if err == nil {
		r, err = p.follow(key, r)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	if size > r.Volume.Size {
		if err := p.Sizes().Refuse(size); err != nil {
			return volume.Volume{}, err
		}
		if err := p.promise("volume "+id, key, r.Volume.Size, size); err != nil {
			return volume.Volume{}, err
		}
		defer p.unpromise(key)
		// An unnecessary GrowDue does no harm.
		r.Volume.Facts.GrowDue = true
		if err := p.expandFile(key, r, size); err != nil {
			return volume.Volume{}, p.noSpace(err)
		}
		if err := failpoint.Err("expand.file"); err != nil {
			return volume.Volume{}, p.noSpace(err)
		}
		r.Volume.Size = size
		p.keepVolume(key, r)
		if err := failpoint.Err("expand.recorded"); err != nil {
			return volume.Volume{}, err
		}
	}
	return r.Volume, p.Refresh(ctx, id)
}

func (p *Pool) expandFile(key string, r journal.VolumeRecord, size int64) error {
	img := p.volumePath(key)
	f, err := os.OpenFile(img, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if r.Volume.Thick {
		err = p.reserve(f, size)
	}
	if err == nil {
		err = p.volumes.PutIfRoom(key, r) // a volume that grows on a full pool is refused
	}
	if err != nil {
		return errors.Join(err, releaseBehindEnd(f))
	}
	if err := lengthen(f, size); err != nil {
		return errors.Join(err, releaseBehindEnd(f))
	}
	return f.Sync()
}

// releaseBehindEnd frees space reserved beyond the end of a file, by truncating it to its
// current length.
func releaseBehindEnd(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	return f.Truncate(st.Size())
}
