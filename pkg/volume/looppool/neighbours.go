package looppool

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Neighbours are the pools of one process. Pools on one file system share its room: what one of them has promised and not taken yet, no
// other may promise. The zero value is ready for use.
type Neighbours struct {
	mu    sync.Mutex // held while a promise is noted; taken before the mu of a Pool
	pools []*Pool
}

// filesystem tells one file system from others. Subvolumes of btrfs have numbers of their own, and an id in common.
type filesystem struct {
	numbers
	id [16]byte
}

// filesystemOf returns the file system of a pool's directory.
func filesystemOf(p *Pool) (on filesystem, err error) {
	fs, err := linux.Fstatfs(p.lock)
	if err != nil {
		return on, err
	}
	if fs.Type&0xffffffff == btrfs {
		on.id, err = linux.BtrfsID(p.lock)
		return on, err
	}
	st, err := linux.StatxFile(p.lock)
	on.numbers = numbers{st.DevMajor, st.DevMinor}
	return on, err
}

func (n *Neighbours) join(p *Pool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pools = append(n.pools, p)
}

func (n *Neighbours) leave(p *Pool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pools = slices.DeleteFunc(n.pools, func(q *Pool) bool { return q == p })
}

// of returns the other pools on the file system of p.
func (n *Neighbours) of(p *Pool) []*Pool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.locked(p)
}

func (n *Neighbours) locked(p *Pool) []*Pool {
	var others []*Pool
	for _, q := range n.pools {
		if q != p && q.on == p.on {
			others = append(others, q)
		}
	}
	return others
}

// taken is what the files of a pool take, and the look that found it.
type taken struct {
	look look
	used int64
}

// quickly returns what the pools beside p have promised, without a look at their files: it is as if these took nothing.
func (p *Pool) quickly() map[*Pool]taken {
	return p.beside(func(q *Pool) (taken, error) {
		l, err := q.quickLook()
		return taken{look: l}, err
	})
}

// thoroughly examines the files of the pools beside p.
func (p *Pool) thoroughly() map[*Pool]taken {
	return p.beside(func(q *Pool) (taken, error) {
		c, l, err := q.measure()
		if err == nil {
			q.mu.Lock()
			q.found = taken{l, c.Used}
			q.mu.Unlock()
		}
		return taken{l, c.Used}, err
	})
}

// beside examines the pools beside p. One that cannot be examined, because it is away, counts as it was found last, or with all that it has
// promised.
func (p *Pool) beside(examine func(*Pool) (taken, error)) map[*Pool]taken {
	found := map[*Pool]taken{}
	for _, q := range p.neighbours.of(p) {
		var t taken
		err := q.sameDirectory()
		if err == nil {
			t, err = examine(q)
		}
		if err != nil {
			q.mu.Lock()
			t = q.found
			q.mu.Unlock()
		}
		found[q] = t
	}
	return found
}

// owed returns how many bytes the pools beside p may still take. Its caller holds neighbours.mu.
func (p *Pool) owed(found map[*Pool]taken) (total int64) {
	for _, q := range p.neighbours.locked(p) {
		t := found[q] // zero for a pool that was opened since: all that it has promised counts
		q.mu.Lock()
		var c volume.Capacity
		q.countPromises(&c, t.look)
		q.mu.Unlock()
		reserve, held := q.reserved.state()
		total += max(int64(float64(c.Promised)/q.overcommit)-t.used, 0) + reserve - held
	}
	return total
}

// besides says whose room is left out, for an error.
func (p *Pool) besides(owed int64) string {
	var names []string
	for _, q := range p.neighbours.of(p) {
		names = append(names, q.name)
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(names)
	return fmt.Sprintf(" and of %d that pools on the same file system may still take (%s)", owed, strings.Join(names, ", "))
}
