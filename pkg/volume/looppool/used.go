package looppool

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// mostPieces is how many pieces of shared files are kept in mind at once (16 MiB). A tenant's writes decide how many there are.
const mostPieces = 1 << 20

// measure tells what the pool lies on has, what the pool's files take of it, and what each snapshot holds. It looks at every file.
func (p *Pool) measure() (c volume.Capacity, held map[string]int64, err error) {
	if c, err = p.space(); err != nil {
		return c, nil, err
	}
	kin := kinship{}
	files := map[string]string{} // to the ID of what it is of
	for key, r := range p.volumes.All() {
		v := r.Volume
		files[p.volumePath(key)] = v.ID
		kin.join(v.ID, v.SourceVolume)
		kin.join(v.ID, v.SourceSnapshot)
	}
	held = map[string]int64{}
	for key, r := range p.snapshots.All() {
		img := p.snapshotPath(key)
		files[img] = r.Snapshot.ID
		kin.join(r.Snapshot.ID, r.Snapshot.Volume)
		if held[key], err = allocated(img); err != nil {
			return c, nil, err
		}
	}
	families := map[string][]string{}
	for img, id := range files {
		families[kin.eldest(id)] = append(families[kin.eldest(id)], img)
	}
	for _, family := range families {
		n, err := usedBy(family, mostPieces)
		if err != nil {
			return c, nil, err
		}
		c.Used += n
	}
	after, err := p.space()
	if err != nil {
		return c, nil, err
	}
	// What was written meanwhile counts at most once.
	c.Available = min(c.Available, after.Available)
	return c, held, nil
}

// kinship says which volumes and snapshots were copied from one another: only their files may lie in the same place.
type kinship map[string]string // an ID to an older one of its family

func (k kinship) eldest(id string) string {
	for k[id] != "" {
		id = k[id]
	}
	return id
}

func (k kinship) join(id, origin string) {
	if a, b := k.eldest(id), k.eldest(origin); origin != "" && a != b {
		k[a] = b
	}
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
