package dirpool

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"syscall"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Allocated returns how many bytes the volume's disk takes.
func (p *Pool) Allocated(id string) (int64, error) {
	key, _, err := p.volumes.Find(id)
	if err != nil {
		return 0, err
	}
	return allocated(p.volumeDisk(key))
}

func allocated(disk string) (int64, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(disk, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", disk, err)
	}
	return st.Blocks * 512, nil
}

// Capacity returns the pool's room. It promises no byte twice.
func (p *Pool) Capacity() (volume.Capacity, error) {
	p.promising.Lock()
	defer p.promising.Unlock()
	return p.capacity()
}

func (p *Pool) capacity() (c volume.Capacity, err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(p.dir, &st); err != nil {
		return c, err
	}
	c.Total, c.Available = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	takes, disks := maps.Clone(p.promises), []string{}
	for key, r := range p.volumes.All() {
		takes[key] = max(takes[key], r.Volume.Size)
		disks = append(disks, p.volumeDisk(key))
	}
	for key, r := range p.snapshots.All() {
		takes[key] = max(takes[key], r.Snapshot.Size)
		disks = append(disks, p.snapshotDisk(key))
	}
	for _, disk := range disks {
		n, err := allocated(disk)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return c, err
		}
		c.Used += n
	}
	if err := syscall.Statfs(p.dir, &st); err != nil {
		return c, err
	}
	c.Available = min(c.Available, int64(st.Bavail)*st.Bsize) // bytes written meanwhile count once
	for n := range maps.Values(takes) {
		c.Promised += n
	}
	c.Left = max(c.Available+c.Used-c.Promised, 0)
	return c, nil
}

// promise reserves room for a record that comes later.
func (p *Pool) promise(key string, has, bytes int64) (free func(), err error) {
	p.promising.Lock()
	defer p.promising.Unlock()
	c, err := p.capacity()
	if err != nil {
		return nil, err
	}
	if bytes-has > c.Left {
		return nil, fault.New(fault.NoSpace, "pool %s has %d bytes left to promise, and %d more were asked for", p.name, c.Left, bytes-has)
	}
	p.promises[key] = bytes
	return func() {
		p.promising.Lock()
		defer p.promising.Unlock()
		delete(p.promises, key)
	}, nil
}
