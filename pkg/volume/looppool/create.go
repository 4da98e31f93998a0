package looppool

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// Create makes a volume: empty, or a copy of a snapshot or of another volume. If it fails, it
// leaves nothing behind.
func (p *Pool) Create(ctx context.Context, spec volume.Spec, progress *volume.Progress) (volume.Volume, error) {
	v := volume.Volume{
		ID: volume.VolumeID(p.name, spec.Name), Name: spec.Name, Size: spec.Size, Created: time.Now().UTC(),
		Thick: spec.Thick, Block: spec.Block, FSType: spec.FSType,
		SourceSnapshot: spec.SourceSnapshot, SourceVolume: spec.SourceVolume, Parameters: maps.Clone(spec.Parameters),
	}
	if v.Parameters == nil {
		v.Parameters = map[string]string{} // known to be empty, unlike nil
	}
	key, ok := p.volumes.Key(v.ID)
	if !ok {
		return volume.Volume{}, fmt.Errorf("id %q does not name a volume of pool %s", v.ID, p.name)
	}
	if err := p.volumes.Unusable(v.ID); err != nil {
		return volume.Volume{}, err
	}
	if spec.SourceSnapshot == "" && spec.SourceVolume == "" { // an origin may have any size
		if err := p.Sizes().Refuse(spec.Size); err != nil {
			return volume.Volume{}, err
		}
	}
	if err := p.checkThick(spec.Thick); err != nil {
		return volume.Volume{}, err
	}
	if err := p.settle(spec.SourceVolume, v.ID); err != nil {
		return volume.Volume{}, err
	}
	origin, thick, err := p.origin(spec, &v)
	if err != nil {
		return volume.Volume{}, err
	}
	img := p.volumePath(key)
	if err := p.volumes.Free(v.ID, img, exists(img)); err != nil {
		return volume.Volume{}, err
	}
	if err := p.promise("volume "+spec.Name, key, 0, v.Size); err != nil {
		return volume.Volume{}, err
	}
	defer p.unpromise(key)
	if err := p.volumes.Put(key, journal.VolumeRecord{State: journal.Creating, Volume: v}); err != nil {
		return volume.Volume{}, err
	}
	err = failpoint.Err("create.recorded")
	if err == nil {
		err = p.fill(ctx, fillSpec{
			img: img, origin: origin, of: spec.SourceVolume, size: v.Size, reserve: v.Thick, share: !v.Thick && !thick, quiesce: spec.Quiesce,
		}, progress)
	}
	if err == nil {
		err = failpoint.Err("create.filled")
	}
	if err == nil {
		err = p.volumes.Put(key, journal.VolumeRecord{State: journal.Ready, Volume: v})
	}
	if err != nil {
		return volume.Volume{}, p.failed(p.noSpace(err), spec.SourceVolume, p.unfinishedVolume(key, v))
	}
	return v, nil
}

// forgetVolume removes a volume's file, then its record, because a file without a record would
// have no owner.
func (p *Pool) forgetVolume(key string) error {
	if err := removeFile(p.volumePath(key)); err != nil {
		return err
	}
	if err := p.volumes.Forget(key); err != nil {
		return err
	}
	p.refillReserve()
	return nil
}

// origin finds the file of which the volume is to be a copy, empty for none, and sets the
// resulting facts in v. If thick is true, the origin is a thick volume, which must not share
// its space.
func (p *Pool) origin(spec volume.Spec, v *volume.Volume) (img string, thick bool, err error) {
	var size int64
	switch {
	case spec.SourceSnapshot != "":
		s, err := p.GetSnapshot(spec.SourceSnapshot)
		if err != nil {
			return "", false, err
		}
		key, _ := p.snapshots.Key(s.ID)
		img = p.snapshotPath(key)
		v.Facts, size = s.Facts, s.Size
	case spec.SourceVolume != "":
		key, r, err := p.volumes.Find(spec.SourceVolume)
		if err == nil {
			r, err = p.follow(key, r)
		}
		if err != nil {
			return "", false, err
		}
		img = p.volumePath(key)
		v.Facts, size, thick = r.Volume.Facts, r.Volume.Size, r.Volume.Thick
	default:
		return "", false, nil
	}
	if v.Size < size {
		return "", false, fault.New(fault.OutOfRange,
			"a copy of %d bytes was asked for, its origin has %d: ask for at least that", v.Size, size)
	}
	if err := wholeOrigin(img, size, v.Size); err != nil {
		return "", false, err
	}
	v.Facts.GrowDue = v.Facts.GrowDue || v.Size > size
	v.Facts.IdentityDue = true
	return img, thick, nil
}

// checkThick refuses thick volumes on file systems where overwriting reserved space may need
// new space.
func (p *Pool) checkThick(thick bool) error {
	if !thick {
		return nil
	}
	dir, err := os.Open(p.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	st, err := linux.Fstatfs(dir)
	if err != nil {
		return err
	}
	if t := st.Type & 0xffffffff; t == btrfs || t == zfs {
		return fault.New(fault.Invalid,
			"provisioning=thick cannot be kept in pool %s: %s is on a copy-on-write file system, where reserved "+
				"space does not stay reserved", p.name, p.dir)
	}
	return nil
}

const btrfs, zfs = 0x9123683e, 0x2fc12fc1 // statfs(2)

// fillSpec describes the content of an image file.
type fillSpec struct {
	img     string
	origin  string // file to copy, empty for none
	of      string // the volume of the origin file, empty for a snapshot
	size    int64
	reserve bool // allocate every byte
	share   bool // extents may be shared with the origin
	quiesce volume.Quiesce
}

// fill makes the image file, durably.
func (p *Pool) fill(ctx context.Context, s fillSpec, progress *volume.Progress) (err error) {
	// O_TRUNC, not O_EXCL: according to the record, an existing file is an unfinished copy of
	// this pool.
	f, err := os.OpenFile(s.img, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	if err := p.inPlace(f, s.origin); err != nil {
		return err
	}
	if s.reserve {
		if err := p.reserve(f, s.size); err != nil {
			return err
		}
	}
	if s.origin != "" {
		if err := p.copyQuiesced(ctx, f, s, progress); err != nil {
			return err
		}
	}
	if err := lengthen(f, s.size); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return record.SyncDir(filepath.Dir(s.img))
}

// inPlace makes a new file on btrfs one that is overwritten in place. Otherwise an extent stays as long as one block of it is in use, and a
// pod that overwrites its volume could fill the pool. A copy must be like its origin, or it could share no extents with it.
func (p *Pool) inPlace(f *os.File, origin string) error {
	st, err := linux.Fstatfs(f)
	if err != nil || st.Type&0xffffffff != btrfs {
		return err
	}
	if origin != "" {
		o, err := os.Open(origin)
		if err != nil {
			return err
		}
		defer o.Close()
		if in, err := linux.Overwritten(o); err != nil || !in {
			return err
		}
	}
	return linux.Overwrite(f)
}

// Delete destroys the volume. A repeated call continues an interrupted one.
func (p *Pool) Delete(_ context.Context, id string) error {
	if err := p.settle("", id); err != nil {
		return err
	}
	key, r, err := p.volumes.Find(id)
	if key == "" {
		return nil // never made, or deleted before
	}
	if err != nil && r.State != journal.Deleting && r.State != journal.Creating {
		return err
	}
	return p.destroy(key, r)
}

func (p *Pool) destroy(key string, r journal.VolumeRecord) error {
	img := p.volumePath(key)
	var devices []loopdev.Device
	if !p.bare(key) {
		var err error
		if devices, err = p.loop.References(img); err != nil {
			return err
		}
	}
	for _, d := range devices {
		err := p.raw.Detach(d)
		if fault.Is(err, fault.State) {
			return fault.New(fault.State, "volume %s is in use, so it is not deleted: %w", r.Volume.ID, err)
		}
		if err != nil {
			return fmt.Errorf("volume %s: its device is not released, so it is not deleted: %w", r.Volume.ID, err)
		}
	}
	r.State = journal.Deleting
	err := p.volumes.Put(key, r)
	if fault.Is(err, fault.NoSpace) {
		// Making room must not need room. A crash after this leaves a volume without a file,
		// and a repeated call continues here.
		if err := removeFile(img); err != nil {
			return err
		}
		err = p.volumes.Put(key, r)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Err("delete.recorded"); err != nil {
		return err
	}
	p.forgetDevice(key)
	p.mu.Lock()
	delete(p.readers, key)
	p.mu.Unlock()
	if err := removeFile(img); err != nil {
		return err
	}
	if err := failpoint.Err("delete.removed"); err != nil {
		return err
	}
	return p.forgetVolume(key)
}
