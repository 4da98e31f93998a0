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
// of the pool, and of other pools on its file system.
func (p *Pool) Capacity() (volume.Capacity, error) {
	// First, so that what they take meanwhile counts as promised and as no longer free.
	beside := p.thoroughly()
	c, l, err := p.measure()
	if err != nil {
		return c, err
	}
	p.neighbours.mu.Lock()
	defer p.neighbours.mu.Unlock()
	owed := p.owed(beside)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.account(&c, l, owed)
	return c, nil
}

// account computes what is promised, and what is left if the pools beside this one may still take that many bytes. The caller holds p.mu.
func (p *Pool) account(c *volume.Capacity, l look, owed int64) {
	p.countPromises(c, l)
	p.leaves(c, owed)
}

// countPromises computes what is promised. For each key it takes the larger of what
// was promised at the time of l and what is promised now. A snapshot counts with what it held
// then, or with its full size if it was not examined. The caller holds p.mu.
func (p *Pool) countPromises(c *volume.Capacity, l look) {
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
}

// leaves computes what can still be promised.
func (p *Pool) leaves(c *volume.Capacity, owed int64) {
	var held int64
	c.Reserve, held = p.reserved.state()
	have := c.Available + c.Used + held - c.Reserve - c.Total/forMaps
	c.Left = max(int64(float64(max(have-owed, 0))*p.overcommit)-c.Promised, 0)
}

// quickLook is a look at no file but those without a usable record.
func (p *Pool) quickLook() (look, error) {
	quick := look{map[string]int64{}, map[string]int64{}}
	unusable, err := p.unusable()
	for _, u := range unusable {
		quick.takes[u.key] = u.size
	}
	return quick, err
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
	quick, err := p.quickLook()
	if err != nil {
		return err
	}
	if fits, _ := p.noteIfLeft(&c, quick, p.quickly(), key, has, bytes); fits {
		return nil
	}
	// Tenants determine how long this takes. Nothing else waits for it.
	beside := p.thoroughly()
	c, l, err := p.measure()
	if err != nil {
		return err
	}
	fits, owed := p.noteIfLeft(&c, l, beside, key, has, bytes)
	if fits {
		return nil
	}
	return fault.New(fault.NoSpace, "pool %s (%s) is full: %s wants %d bytes more, and %d are left to promise: "+
		"%d are promised, of a room of %d bytes (%d free, %d used) times overcommit=%g, without the reserve of %d%s; "+
		"delete volumes or snapshots, enlarge the pool, or start the driver with a larger overcommit",
		p.name, p.dir, what, bytes-has, c.Left, c.Promised, c.Available+c.Used, c.Available, c.Used, p.overcommit, c.Reserve,
		p.besides(owed))
}

// noteIfLeft checks and notes atomically, so that no two promises use the same bytes. It also returns what the pools beside this one may
// still take.
func (p *Pool) noteIfLeft(
	c *volume.Capacity, l look, beside map[*Pool]taken, key string, has, bytes int64,
) (fits bool, owed int64) {
	p.neighbours.mu.Lock()
	defer p.neighbours.mu.Unlock()
	owed = p.owed(beside)
	p.mu.Lock()
	defer p.mu.Unlock()
	l.held[key] = has // of a snapshot that is not finished, too
	p.account(c, l, owed)
	if bytes-has > c.Left {
		return false, owed
	}
	p.intended[key] = bytes
	return true, owed
}

// spare returns how many bytes are free, and promised neither by this pool nor by those beside it. Volumes come before the reserve, because
// a write that fails for lack of space loses data. It examines no file if enough is spare without the space that files take.
func (p *Pool) spare(enough int64) int64 {
	c, err := p.space()
	if err != nil || c.Available-c.Total/forMaps < reservePiece { // no look at the files finds more
		return 0
	}
	quick, err := p.quickLook()
	if err != nil {
		return 0
	}
	if n := p.notOwed(c, quick, p.quickly()); n >= enough {
		return n
	}
	beside := p.thoroughly()
	c, l, err := p.measure()
	if err != nil {
		return 0
	}
	return p.notOwed(c, l, beside)
}

// notOwed is the free space without what volumes, snapshots and the file system's maps may still take.
func (p *Pool) notOwed(c volume.Capacity, l look, beside map[*Pool]taken) int64 {
	p.neighbours.mu.Lock()
	defer p.neighbours.mu.Unlock()
	owed := p.owed(beside)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countPromises(&c, l)
	return c.Available - max(int64(float64(c.Promised)/p.overcommit)-c.Used, 0) - owed - c.Total/forMaps
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
