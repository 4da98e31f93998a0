package looppool

import (
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// refill allocates the holes of a thick volume's file, which mkfs or writes of zeros may have
// made. If the pool has no room, the volume stays usable, and Health reports it.
func (p *Pool) refill(img string, v volume.Volume) error {
	f, err := os.OpenFile(img, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	err = p.noSpace(p.reserve(f, v.Size))
	if fault.Is(err, fault.NoSpace) {
		p.log.Warn("a thick volume is not wholly reserved", "volume_id", v.ID, "error", err)
		return nil
	}
	return err
}

// reserve allocates the missing parts of the first size bytes of a file: all or, if it can tell
// beforehand, nothing. It requests only the holes, because xfs wants free space for the whole
// range before it checks what is allocated.
func (p *Pool) reserve(f *os.File, size int64) error {
	need, err := unallocated(f, size, true)
	if err != nil || need == 0 {
		return err
	}
	c, err := p.space()
	if err != nil {
		return err
	}
	if need > c.Available {
		return fault.New(fault.NoSpace, "pool %s (%s) is full: %d bytes were to be reserved and %d are free; "+
			"delete volumes or snapshots, enlarge it, or ask for provisioning=thin", p.name, p.dir, need, c.Available)
	}
	return holes(f, size, true, func(h linux.Range) error {
		if err := linux.Fallocate(f, h.Start, h.Length); err != nil {
			return fmt.Errorf("reserve %d bytes: %w", need, err)
		}
		return nil
	})
}

// unallocated returns how many of the first size bytes of a file take no space.
func unallocated(f *os.File, size int64, sync bool) (n int64, err error) {
	err = holes(f, size, sync, func(h linux.Range) error { n += h.Length; return nil })
	return n, err
}

// holes calls each for the holes in the first size bytes of a file. A tenant determines how
// many there are. If the file system does not report holes, a file that takes less space than
// size counts as one hole.
func holes(f *os.File, size int64, sync bool, each func(linux.Range) error) error {
	var stopped error
	err := linux.Holes(f, size, sync, func(h linux.Range) error { stopped = each(h); return stopped })
	if stopped != nil || !linux.NoFiemap(err) {
		return err
	}
	st, err := linux.StatxFile(f)
	if err != nil || st.Allocated >= size {
		return err
	}
	return each(linux.Range{Start: 0, Length: size})
}

// unreserved reports a thick volume whose file has holes.
func (p *Pool) unreserved(img string, v volume.Volume) []mounter.Ailment {
	f, err := os.Open(img)
	if err != nil {
		return nil // Health reports the pool's problem
	}
	defer f.Close()
	missing, err := unallocated(f, v.Size, false) // Health is called often and must not write
	if err != nil || missing == 0 {
		return nil
	}
	return []mounter.Ailment{{Reason: "NotReserved", Message: fmt.Sprintf(
		"%d MiB of this thick volume are not reserved: its file has holes, and writes there fail when pool %s is full; "+
			"they are reserved again when it is next staged and the pool has room",
		(missing+1<<20-1)>>20, p.name)}}
}
