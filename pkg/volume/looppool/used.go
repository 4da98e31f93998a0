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

// mostPieces is how many pieces of shared files are kept in mind at once (16 bytes each). A tenant's writes decide how many there are.
const mostPieces = 1 << 20

// look is what was learnt by a look at all files. Its zero value is none.
type look struct {
	takes map[string]int64 // what was promised when it began, by key: what is gone since may still count as room
	held  map[string]int64 // what snapshots hold that were finished then
}

// measure tells how large the pool's file system is, what is free, and what the pool's files take. One runs at a time, for the
// memory that it takes.
func (p *Pool) measure() (c volume.Capacity, l look, err error) {
	p.measuring.Lock()
	defer p.measuring.Unlock()
	p.mu.Lock()
	l = look{maps.Clone(p.intended), map[string]int64{}}
	p.mu.Unlock()
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
			continue // it may have all of its size by the time that anybody asks
		}
		if l.held[key], err = allocated(img); err != nil {
			return c, l, err
		}
		l.takes[key] = max(l.takes[key], l.held[key])
	}
	lost := kin.lost(volumes, snapshots) // the link may have led to anybody
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
	// What was written meanwhile counts at most once.
	c.Available = min(c.Available, after.Available)
	return c, l, nil
}

// kinship says which volumes and snapshots were copied from one another, by their keys: only their files may lie in the same place.
type kinship map[string]string // a key to an older one of its family

func (k kinship) eldest(key string) string {
	for k[key] != "" {
		key = k[key]
	}
	return key
}

// join takes the id of an origin, which may have the name that the pool had before.
func (k kinship) join(key, origin string) {
	_, of, _, ok := volume.ParseID(origin)
	if a, b := k.eldest(key), k.eldest(of); ok && a != b {
		k[a] = b
	}
}

// lost tells whether an origin has no record any more, and what it was copied from is not known.
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

// allocated is how many bytes a file takes; one that is gone takes none.
func allocated(img string) (int64, error) {
	st, err := linux.StatxPath(img)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return st.Allocated, err
}

// usedBy is how many bytes the files of a family take together. What several of them share counts once. Files that lie in more
// pieces than can be kept in mind may take more than that, and never less: a pool then promises too little, not too much.
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
	// Of one file, all pieces lie in places of their own.
	return own + max(common.length(), largest), nil
}

// union is where pieces lie, which may lie upon each other.
type union struct {
	pieces []linux.Range
	most   int
	full   bool
}

// add takes a piece in, unless there are too many.
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

// merge makes one piece of those that touch.
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

// takes gives how many bytes a file takes for itself, and how many beside that, perhaps together with others. It hands where
// those lie.
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
