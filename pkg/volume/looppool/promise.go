package looppool

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// What a pool has promised are the sizes of its volumes, and what its snapshots
// hold. What it may promise is the room that it has (what is free, and what its
// own files take) times the overcommit.

// fullBelow is what a pool that counts as full has left: a file system writes
// its own records in pieces of this order.
const fullBelow = 1 << 20

// forMaps: one in so many bytes of a pool is left to its file system, for the
// maps of volumes' files.
const forMaps = 128

// Allocated is what the volume's file takes.
func (p *Pool) Allocated(id string) (int64, error) {
	key, _, err := p.find(id)
	if err != nil {
		return 0, err
	}
	_, img := p.volumePath(key)
	return allocated(img)
}

// Capacity tells what the pool has, and what of it is promised. It looks at every
// file of the pool.
func (p *Pool) Capacity() (volume.Capacity, error) {
	c, err := p.space()
	if err != nil {
		return c, err
	}
	p.mu.Lock()
	volumes, snapshots, intended := maps.Clone(p.volumes), maps.Clone(p.snapshots), maps.Clone(p.intended)
	p.mu.Unlock()
	var files []string
	shares := len(snapshots) > 0
	for key, r := range volumes {
		_, img := p.volumePath(key)
		files = append(files, img)
		intended[key] = max(intended[key], r.Volume.Size)
		shares = shares || r.Volume.SourceSnapshot != "" || r.Volume.SourceVolume != ""
	}
	for key := range snapshots {
		_, img := p.snapshotPath(key)
		files = append(files, img)
		held, err := allocated(img)
		if err != nil {
			return c, err
		}
		intended[key] = max(intended[key], held)
	}
	for _, n := range intended {
		c.Promised += n
	}
	if c.Used, err = usedBy(files, shares); err != nil {
		return c, err
	}
	after, err := p.space()
	if err != nil {
		return c, err
	}
	// What was written meanwhile counts at most once.
	c.Available = min(c.Available, after.Available)
	p.leaves(&c)
	return c, nil
}

// leaves tells what can still be promised.
func (p *Pool) leaves(c *volume.Capacity) {
	var held int64
	c.Reserve, held = p.reserved.state()
	have := c.Available + c.Used + held - c.Reserve - c.Total/forMaps
	c.Left = max(int64(float64(max(have, 0))*p.overcommit)-c.Promised, 0)
}

// fits tells whether so many bytes more are surely left, without a look at the
// files: if all that is promised, taken to the full, fit into what is free, what the
// pool's files have already is on top.
func (p *Pool) fits(bytes int64) (bool, error) {
	c, err := p.space()
	if err != nil {
		return false, err
	}
	p.mu.Lock()
	for key, v := range p.volumes {
		c.Promised += max(p.intended[key], v.Volume.Size)
	}
	for key, s := range p.snapshots {
		c.Promised += max(p.intended[key], s.Snapshot.Size)
	}
	for key, n := range p.intended {
		_, isVolume := p.volumes[key]
		_, isSnapshot := p.snapshots[key]
		if !isVolume && !isSnapshot {
			c.Promised += n
		}
	}
	p.mu.Unlock()
	p.leaves(&c)
	return bytes <= c.Left, nil
}

// promise notes that the volume or snapshot of a key, which has so many bytes,
// is about to have more, if they are left. The caller takes the note off (see
// unpromise) when a record says the same, or nothing came of it.
func (p *Pool) promise(what, key string, has, bytes int64) error {
	p.refillReserve()
	p.promising.Lock()
	defer p.promising.Unlock()
	fits, err := p.fits(bytes - has)
	if err != nil {
		return err
	}
	var c volume.Capacity
	if !fits {
		if c, err = p.Capacity(); err != nil {
			return err
		}
	}
	if !fits && bytes-has > c.Left {
		return fault.New(fault.NoSpace, "pool %s (%s) is full: %s wants %d bytes more, and %d are left to promise: "+
			"%d are promised, of a room of %d bytes (%d free, %d used) times overcommit=%g, without the reserve of %d; "+
			"delete volumes or snapshots, enlarge the pool, or start the driver with a larger overcommit",
			p.name, p.dir, what, bytes-has, c.Left, c.Promised, c.Available+c.Used, c.Available, c.Used, p.overcommit, c.Reserve)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.intended[key] = bytes
	return nil
}

func (p *Pool) unpromise(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.intended, key)
}

// allocated is how many bytes a file takes; one that is gone takes none.
func allocated(img string) (int64, error) {
	st, err := linux.StatxPath(img)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return st.Allocated, err
}

// usedBy is how many bytes files take together. With shares, some may lie in
// the same place, which counts once.
func usedBy(files []string, shares bool) (int64, error) {
	var total int64
	var common []linux.Range
	for _, img := range files {
		n, parts, err := takes(img, shares)
		if err != nil {
			return 0, err
		}
		total += n
		common = append(common, parts...)
	}
	slices.SortFunc(common, func(a, b linux.Range) int { return int(min(max(a.Start-b.Start, -1), 1)) })
	end := int64(0)
	for _, r := range common {
		if from := max(r.Start, end); r.Start+r.Length > from {
			total += r.Start + r.Length - from
			end = r.Start + r.Length
		}
	}
	return total, nil
}

// takes gives how many bytes a file takes for itself, and where it lies beside
// that, perhaps together with others.
func takes(img string, shares bool) (own int64, common []linux.Range, err error) {
	if !shares {
		own, err = allocated(img)
		return own, nil, err
	}
	f, err := os.Open(img)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, nil, err
	}
	err = linux.Extents(f, st.Size(), false, func(e linux.Extent) {
		if e.Shared {
			common = append(common, linux.Range{Start: e.Physical, Length: e.Length})
		} else {
			own += e.Length
		}
	})
	if linux.NoFiemap(err) {
		own, err = allocated(img)
		return own, nil, err
	}
	return own, common, err
}

// mayNeedSpace tells whether a write to the volume may need room in the pool.
func (p *Pool) mayNeedSpace(id string) bool {
	_, r, err := p.find(id)
	return err != nil || !r.Volume.Thick
}
