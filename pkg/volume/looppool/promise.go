package looppool

import (
	"maps"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// A pool has promised the sizes of its volumes and the data that its snapshots hold. It may
// promise its space (what is free, and what its own files take) times the overcommit.

// fullBelow is the remaining space, in bytes, below which a pool counts as full. A file system
// writes its own metadata in pieces of this order.
const fullBelow = 1 << 20

// forMaps is the part of a pool (1/forMaps) that is left to its file system, for the extent
// maps of volumes' files.
const forMaps = 128

// Allocated returns the bytes that the volume's file takes.
func (p *Pool) Allocated(id string) (int64, error) {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return 0, err
	}
	img := p.volumePath(key)
	return allocated(img)
}

// Capacity returns the pool's capacity and how much of it is promised. It examines every file
// of the pool.
func (p *Pool) Capacity() (volume.Capacity, error) {
	c, l, err := p.measure()
	if err != nil {
		return c, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.account(&c, l)
	return c, nil
}

// account computes what is promised and what is left. For each key it takes the larger of what
// was promised at the time of l and what is promised now. A snapshot counts with what it held
// then, or with its full size if it was not examined. The caller holds p.mu.
func (p *Pool) account(c *volume.Capacity, l look) {
	takes := maps.Clone(p.intended)
	for key, n := range l.takes {
		takes[key] = max(takes[key], n)
	}
	p.volumes.Each(func(key string, v journal.VolumeRecord) {
		takes[key] = max(takes[key], v.Volume.Size)
	})
	p.snapshots.Each(func(key string, s journal.SnapshotRecord) {
		n, seen := l.held[key]
		if !seen {
			n = s.Snapshot.Size
		}
		takes[key] = max(takes[key], n)
	})
	c.Promised = 0
	for _, n := range takes {
		c.Promised += n
	}
	p.leaves(c)
}

// leaves computes what can still be promised.
func (p *Pool) leaves(c *volume.Capacity) {
	var held int64
	c.Reserve, held = p.reserved.state()
	have := c.Available + c.Used + held - c.Reserve - c.Total/forMaps
	c.Left = max(int64(float64(max(have, 0))*p.overcommit)-c.Promised, 0)
}

// promise notes that the volume or snapshot of a key, which has that many bytes, is about to
// have more, if they are left. The caller removes the note (see unpromise) once a record says
// the same, or if the operation failed.
func (p *Pool) promise(what, key string, has, bytes int64) error {
	p.refillReserve()
	c, err := p.space()
	if err != nil {
		return err
	}
	// Most often no file needs to be examined: if all promises in full fit into the free space,
	// the space of the pool's existing files is additional.
	quick := look{map[string]int64{}, map[string]int64{}}
	unusable, err := p.unusable()
	if err != nil {
		return err
	}
	for _, u := range unusable {
		quick.takes[u.key] = u.size
	}
	if p.noteIfLeft(&c, quick, key, has, bytes) {
		return nil
	}
	// Tenants determine how long this takes. Nothing else waits for it.
	c, l, err := p.measure()
	if err != nil {
		return err
	}
	if p.noteIfLeft(&c, l, key, has, bytes) {
		return nil
	}
	return fault.New(fault.NoSpace, "pool %s (%s) is full: %s wants %d bytes more, and %d are left to promise: "+
		"%d are promised, of a room of %d bytes (%d free, %d used) times overcommit=%g, without the reserve of %d; "+
		"delete volumes or snapshots, enlarge the pool, or start the driver with a larger overcommit",
		p.name, p.dir, what, bytes-has, c.Left, c.Promised, c.Available+c.Used, c.Available, c.Used, p.overcommit, c.Reserve)
}

// noteIfLeft checks and notes atomically, so that no two promises use the same bytes.
func (p *Pool) noteIfLeft(c *volume.Capacity, l look, key string, has, bytes int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.held[key] = has // of a snapshot that is not finished, too
	p.account(c, l)
	if bytes-has > c.Left {
		return false
	}
	p.intended[key] = bytes
	return true
}

func (p *Pool) unpromise(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.intended, key)
}

// mayNeedSpace reports whether a write to the volume may need space in the pool.
func (p *Pool) mayNeedSpace(id string) bool {
	_, r, err := p.volumes.Find(id)
	return err != nil || !r.Volume.Thick
}
