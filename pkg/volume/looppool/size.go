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

// The size of a volume is that of its file. Its record follows: a crash may
// leave a file that is larger than its record says, and devices and file
// systems may have grown into it since. No file is ever made shorter.

// follow makes the record of a volume say how large its file is. A file that
// is shorter than its record lost data: that is a fault State.
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

// followAll is follow for everything in the pool. What cannot be followed is
// refused when it is used.
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

// keepVolume is Put for what the file says as well: where the record
// cannot be written, it holds for this process, and the next one finds it again.
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

// wholeOrigin refuses to copy a file that is shorter than it should be, or
// larger than the copy will be.
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

// lengthen makes a file that long; one that is longer is a fault and not cut.
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

// Expand makes the volume larger, and its devices. What can fail for lack of
// space comes first: when it does, nothing has changed.
func (p *Pool) Expand(ctx context.Context, id string, size int64) (volume.Volume, error) {
	key, r, err := p.volumes.Find(id)
	if err == nil {
		r, err = p.follow(key, r)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	if size > r.Volume.Size {
		if err := p.promise("volume "+id, key, r.Volume.Size, size); err != nil {
			return volume.Volume{}, err
		}
		defer p.unpromise(key)
		// A growth that is due needlessly does nothing.
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

// releaseBehindEnd gives back what was reserved behind the end of a file, by
// truncating it to the length that it has.
func releaseBehindEnd(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	return f.Truncate(st.Size())
}
