package looppool

import (
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// mostPieces is the maximum number of pieces of shared files in memory (16 bytes each).
// Tenants' writes determine how many there are.
const mostPieces = 1 << 20

// look is the result of examining all files. The zero value has no results.
type look struct {
	takes map[string]int64 // what was promised at its start, by key; files deleted since may still count as room
	held  map[string]int64 // the data of snapshots that were finished at its start
}

// measure returns the size and free space of the pool's file system, and the space that the
// pool's files take. Only one runs at a time, because of the memory that it needs.
func (p *Pool) measure() (c volume.Capacity, l look, err error) {
	p.measuring.Lock()
	defer p.measuring.Unlock()
	p.mu.Lock()
	l = look{maps.Clone(p.intended), map[string]int64{}}
	p.mu.Unlock()
	unusable, err := p.unusable()
	if err != nil {
		return c, l, err
	}
	volumes, snapshots := p.volumes.All(), p.snapshots.All()
	kin := kinship{}
	var files []string
	var keys []string
	for key, r := range volumes {
		l.takes[key] = max(l.takes[key], r.Volume.Size)
		files, keys = append(files, p.volumePath(key)), append(keys, key)
		kin.join(key, r.Volume.SourceVolume)
		kin.join(key, r.Volume.SourceSnapshot)
	}
	if c, err = p.space(); err != nil {
		return c, l, err
	}
	for key, r := range snapshots {
		img := p.snapshotPath(key)
		files, keys = append(files, img), append(keys, key)
		kin.join(key, r.Snapshot.Volume)
		if r.State != journal.Ready {
			continue // it may have reached its full size by the time of use
		}
		if l.held[key], err = allocated(img); err != nil {
			return c, l, err
		}
		l.takes[key] = max(l.takes[key], l.held[key])
	}
	for img, u := range unusable {
		l.takes[u.key] = max(l.takes[u.key], u.size)
		files, keys = append(files, img), append(keys, u.key)
	}
	// The missing link, or an unusable record, may have led to any file.
	lost := len(unusable) > 0 || kin.lost(volumes, snapshots)
	families := map[string][]string{}
	for i, key := range keys {
		eldest := ""
		if !lost {
			eldest = kin.eldest(key)
		}
		families[eldest] = append(families[eldest], files[i])
	}
	for _, family := range families {
		n, err := usedBy(family, mostPieces)
		if err != nil {
			return c, l, err
		}
		c.Used += n
	}
	after, err := p.space()
	if err != nil {
		return c, l, err
	}
	// Writes during the measurement count at most once.
	c.Available = min(c.Available, after.Available)
	// A file system that compresses shows the size of files' content, not what it takes.
	st, err := p.statfs()
	c.Used = min(c.Used, int64((st.Blocks-st.Free)*st.BlockSize))
	return c, l, err
}

// unusableFile is a file whose record cannot be used. The space that it was promised stays promised, because a pod may still use it.
type unusableFile struct {
	key  string
	size int64 // of a volume its whole size, of a snapshot what it takes
}

// unusable lists these files, by path.
func (p *Pool) unusable() (map[string]unusableFile, error) {
	files := map[string]unusableFile{}
	for _, key := range p.volumes.UnusableKeys() {
		img := p.volumePath(key)
		st, err := os.Lstat(img)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		files[img] = unusableFile{key, st.Size()}
	}
	for _, key := range p.snapshots.UnusableKeys() {
		img := p.snapshotPath(key)
		n, err := allocated(img)
		if err != nil {
			return nil, err
		}
		files[img] = unusableFile{key, n}
	}
	return files, nil
}

// kinship records which volumes and snapshots were copied from one another, by key. Only files
// of one family can share extents.
type kinship map[string]string // a key to an older one of its family

func (k kinship) eldest(key string) string {
	for k[key] != "" {
		key = k[key]
	}
	return key
}

// join adds the id of an origin, which may contain a former name of the pool.
func (k kinship) join(key, origin string) {
	_, of, _, ok := volume.ParseID(origin)
	if a, b := k.eldest(key), k.eldest(of); ok && a != b {
		k[a] = b
	}
}

// lost reports whether an origin has no record any more, so that its own origin is unknown.
func (k kinship) lost(volumes map[string]journal.VolumeRecord, snapshots map[string]journal.SnapshotRecord) bool {
	for _, of := range k {
		_, isVolume := volumes[of]
		_, isSnapshot := snapshots[of]
		if !isVolume && !isSnapshot {
			return true
		}
	}
	return false
}

// allocated returns how many bytes a file takes; a missing file takes none.
func allocated(img string) (int64, error) {
	st, err := linux.StatxPath(img)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return st.Allocated, err
}

// usedBy returns how many bytes the files of a family take together. Shared space counts once.
// If there are more pieces than fit in memory, the result may be too large, but never too
// small: the pool then promises too little, not too much.
func usedBy(files []string, most int) (int64, error) {
	if len(files) == 1 {
		return allocated(files[0])
	}
	var own, largest int64
	common := union{most: most}
	for _, img := range files {
		alone, shared, err := takes(img, common.add)
		if err != nil {
			return 0, err
		}
		own += alone
		largest = max(largest, shared)
	}
	// The pieces of a single file never overlap.
	return own + max(common.length(), largest), nil
}

// union is a set of ranges on the disk, which may overlap.
type union struct {
	pieces []linux.Range
	most   int
	full   bool
}

// add adds a range, unless there are too many.
func (u *union) add(r linux.Range) {
	if n := len(u.pieces); n > 0 && u.pieces[n-1].Start+u.pieces[n-1].Length == r.Start {
		u.pieces[n-1].Length += r.Length
		return
	}
	if u.full {
		return
	}
	u.pieces = append(u.pieces, r)
	if len(u.pieces) >= u.most {
		u.merge()
		u.full = len(u.pieces) > u.most/2
	}
}

// merge combines adjacent and overlapping ranges.
func (u *union) merge() {
	slices.SortFunc(u.pieces, func(a, b linux.Range) int { return cmp.Compare(a.Start, b.Start) })
	merged := u.pieces[:0]
	for _, r := range u.pieces {
		if n := len(merged); n > 0 && r.Start <= merged[n-1].Start+merged[n-1].Length {
			merged[n-1].Length = max(merged[n-1].Length, r.Start+r.Length-merged[n-1].Start)
		} else {
			merged = append(merged, r)
		}
	}
	u.pieces = merged
}

func (u *union) length() (total int64) {
	u.merge()
	for _, r := range u.pieces {
		total += r.Length
	}
	return total
}

// takes returns how many bytes a file takes alone, and how many it may share with others. It
// calls lies with the ranges of the latter.
func takes(img string, lies func(linux.Range)) (own, shared int64, err error) {
	f, err := os.Open(img)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	err = linux.Extents(f, st.Size(), false, func(e linux.Extent) error {
		if e.Shared {
			lies(linux.Range{Start: e.Physical, Length: e.Length})
			shared += e.Length
		} else {
			own += e.Length
		}
		return nil
	})
	if linux.NoFiemap(err) {
		own, err = allocated(img)
	}
	return own, shared, err
}
