// Package looppool is a pool of volumes that are files in a directory, presented as block
// devices by the loop driver.
//
// The directory is self-contained:
//
//	volumes/v<key>.json     the record of a volume (versioned)
//	volumes/v<key>.img      its data
//	snapshots/s<key>.json   the same for snapshots
//	snapshots/s<key>.img
//
// A record is written before its file is made, and marked before the file is destroyed. So
// every file can be accounted for after a crash at any point. The directory can be moved to
// another machine, or opened with another state directory. Only one process at a time can have
// it open.
package looppool

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

var (
	volumeType   = record.Type{Kind: "crust-csi.loop-volume", Version: 2}
	snapshotType = record.Type{Kind: "crust-csi.loop-snapshot", Version: 1}
)

// Pool is one directory. Its methods may be called concurrently for different volumes.
type Pool struct {
	journal.Records

	name string
	dir  string
	log  *slog.Logger
	lock *os.File
	loop loopdev.Nodes
	raw  rawdevice.Guard

	copied func(bytes int64)

	overcommit float64
	neighbours *Neighbours
	on         filesystem // its file system
	reserved   reserveFile
	measuring  sync.Mutex // held while measure examines all files

	thawPatience time.Duration

	volumes   *journal.Book[journal.VolumeRecord]
	snapshots *journal.Book[journal.SnapshotRecord]

	mu       sync.Mutex                // guards the maps, never held during I/O
	intended map[string]int64          // bytes that volumes and snapshots are about to take, by key
	found    taken                     // by the last thorough look for a neighbour
	attached map[string]loopdev.Device // the read-write device, by key
	owner    map[numbers]string        // the key of attached, by device number
	readers  map[string]bool           // volumes that may have read-only devices, by key
	// readersKnown means that readers has those of earlier processes, too.
	readersKnown bool
	changed      map[string]string  // what pods changed on their devices, by key
	frozen       map[string]*frozen // volumes that may be frozen for no copy, by id
	thaw         volume.Thaw        // the argument of Recover
}

type numbers struct{ major, minor uint32 }

var _ volume.Pool = (*Pool)(nil)

// Options are the options of Open.
type Options struct {
	Name     string
	Dir      string
	NodesDir string            // for loop device nodes that /dev lacks
	Log      *slog.Logger      // nil: no log
	Copied   func(bytes int64) // counts bytes of copies; may be nil

	// Overcommit is the factor by which the pool's space may be promised to volumes, counted by
	// their sizes. 0 means 1: everything promised fits.
	Overcommit float64
	// Reserve is how many bytes are kept free for records, so that they can be written when
	// volumes have filled the pool. 0: 64 MiB, or a sixteenth of a small pool.
	Reserve int64
	// Neighbours are the other pools of this process. nil: there are none.
	Neighbours *Neighbours
}

// Open opens a directory as a pool, and creates it if it does not exist.
func Open(o Options) (*Pool, error) {
	if err := volume.CheckPoolName(o.Name); err != nil {
		return nil, err
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Copied == nil {
		o.Copied = func(int64) {}
	}
	p := &Pool{
		name: o.Name, log: o.Log.With("pool", o.Name), loop: loopdev.Nodes{Dir: o.NodesDir}, copied: o.Copied,
		raw: rawdevice.Guard{Loops: loopdev.Nodes{Dir: o.NodesDir}}, changed: map[string]string{}, frozen: map[string]*frozen{},
		thaw: func(volume.Source, string) error { return nil }, thawPatience: thawPatience,
		overcommit: max(o.Overcommit, 1), neighbours: cmp.Or(o.Neighbours, &Neighbours{}), intended: map[string]int64{},
		attached: map[string]loopdev.Device{}, owner: map[numbers]string{}, readers: map[string]bool{},
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("pool %s: %w", o.Name, err)
	}
	var err error
	if p.dir, err = filepath.EvalSymlinks(o.Dir); err != nil {
		return nil, err
	}
	if p.dir, err = filepath.Abs(p.dir); err != nil {
		return nil, err
	}
	if p.lock, err = os.OpenFile(filepath.Join(p.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := linux.Flock(p.lock); err != nil {
		p.lock.Close()
		return nil, fault.New(fault.Busy, "pool %s: another process has %s open: %w", o.Name, p.dir, err)
	}
	if err := p.load(); err != nil {
		p.lock.Close()
		return nil, fmt.Errorf("pool %s: %w", o.Name, err)
	}
	if err := p.openReserve(o.Reserve); err != nil {
		p.lock.Close()
		return nil, fmt.Errorf("pool %s: %w", o.Name, err)
	}
	if p.on, err = filesystemOf(p); err != nil {
		return nil, fmt.Errorf("pool %s: %w", o.Name, errors.Join(err, p.Close()))
	}
	p.neighbours.join(p)
	return p, nil
}

// Empty returns nil if the directory holds no volume and no snapshot: no record, no file of
// one, and nothing unreadable. A missing directory is an error: its disk may not be mounted, or
// not where this process can see it. Empty writes nothing.
func Empty(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return err
	}
	for _, sub := range []string{"volumes", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err == nil && len(entries) > 0 {
			err = fault.New(fault.State, "%s has %d files in %s", dir, len(entries), sub)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (p *Pool) load() (err error) {
	o := journal.Options{
		Pool: p.name, Format: journal.Format(volumeType), Dir: filepath.Join(p.dir, "volumes"), Log: p.log, Write: p.write,
	}
	if p.volumes, err = journal.OpenVolumes(o); err != nil {
		return err
	}
	o.Format, o.Dir = journal.Format(snapshotType), filepath.Join(p.dir, "snapshots")
	if p.snapshots, err = journal.OpenSnapshots(o); err != nil {
		return err
	}
	p.Records = journal.NewRecords(p.volumes, p.snapshots)
	p.followAll()
	return nil
}

// Close releases the directory for another process. Devices stay attached.
func (p *Pool) Close() error {
	p.neighbours.leave(p)
	return errors.Join(p.reserved.file.Close(), p.lock.Close())
}

// Name returns the pool's name.
func (p *Pool) Name() string { return p.name }

// Dir returns the pool's directory.
func (p *Pool) Dir() string { return p.dir }

// Sizes returns volume.FileSizes.
func (p *Pool) Sizes() volume.Sizes { return volume.FileSizes() }

// Usable returns nil if volumes can be made and attached.
func (p *Pool) Usable() error {
	if err := linux.AccessWrite(p.dir); err != nil {
		return fault.New(fault.State, "pool %s: %s cannot be written: %w", p.name, p.dir, err)
	}
	if err := p.sameDirectory(); err != nil {
		return err
	}
	return loopdev.Available()
}

// sameDirectory returns nil if the pool's path leads to the directory that was opened.
func (p *Pool) sameDirectory() error {
	here, err := linux.StatxPath(filepath.Join(p.dir, "lock"))
	if err == nil {
		var mine linux.Statx
		if mine, err = linux.StatxFile(p.lock); err == nil && mine.Ino != here.Ino {
			err = errors.New("the lock file was replaced")
		}
	}
	if err != nil {
		return fault.New(fault.State, "pool %s: %s is not the directory that was opened: %w", p.name, p.dir, err)
	}
	return nil
}

// Answers returns after the pool's disk has taken a write. A disk that hangs, or whose file
// system is frozen, takes none, although the kernel may still answer reads from its cache. A
// full disk answers.
func (p *Pool) Answers() error {
	_, err := p.lock.WriteAt([]byte{'\n'}, 0) // the file's text means nothing
	return errors.Join(err, p.lock.Sync())
}

// space returns the capacity of the file system of the directory.
func (p *Pool) space() (volume.Capacity, error) {
	st, err := p.statfs()
	if err != nil {
		return volume.Capacity{}, err
	}
	return volume.Capacity{Total: int64(st.Blocks * st.BlockSize), Available: int64(st.Available * st.BlockSize)}, nil
}

func (p *Pool) statfs() (linux.Statfs, error) {
	dir, err := os.Open(p.dir)
	if err != nil {
		return linux.Statfs{}, err
	}
	defer dir.Close()
	return linux.Fstatfs(dir)
}

func (p *Pool) volumePath(key string) (img string) { return p.volumes.Path(key, imageExtension) }

func (p *Pool) snapshotPath(key string) (img string) { return p.snapshots.Path(key, imageExtension) }

// Health reports problems of the pool or of the volume's file.
func (p *Pool) Health(id string) []mounter.Ailment {
	var found []mounter.Ailment
	if err := p.settle(id, ""); err != nil {
		found = append(found, mounter.Ailment{Reason: "Frozen", Message: err.Error(), Fatal: true})
	}
	if key, r, err := p.volumes.Find(id); err == nil {
		found = append(found, p.rawHealth(key)...)
		img := p.volumePath(key)
		st, err := os.Lstat(img)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			found = append(found, mounter.Ailment{Reason: "ImageGone", Message: "the volume's file " + img + " is gone", Fatal: true})
		case err == nil && st.Size() < r.Volume.Size:
			found = append(found, mounter.Ailment{Reason: "ImageShort", Message: short("volume "+id, img, st.Size(), r.Volume.Size).Error(),
				Fatal: true})
		case err == nil && r.Volume.Thick:
			found = append(found, p.unreserved(img, r.Volume)...)
		}
	}
	c, err := p.space()
	switch {
	case err != nil:
		found = append(found, mounter.Ailment{Reason: "PoolUnreadable", Message: err.Error(), Fatal: true})
	case c.Available < fullBelow && p.mayNeedSpace(id):
		found = append(found, mounter.Ailment{Reason: "PoolFull", Fatal: true, Message: fmt.Sprintf(
			"pool %s is full (%d KiB of %d MiB are left): writes to the volume fail or are lost, also where they seem to succeed; stop the pods, "+
				"delete volumes or snapshots, or enlarge the pool",
			p.name, c.Available>>10, c.Total>>20)})
	case c.NearlyFull():
		found = append(found, mounter.Ailment{Reason: "PoolNearlyFull", Message: fmt.Sprintf(
			"pool %s has %d MiB of %d MiB left: thin volumes will fail writes when it is full; delete volumes or snapshots, or enlarge it",
			p.name, c.Available>>20, c.Total>>20)})
	}
	return found
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// noSpace gives an error its kind if the pool's file system is full.
func (p *Pool) noSpace(err error) error {
	if errors.Is(err, linux.ENOSPC) {
		c, _ := p.space()
		return fault.New(fault.NoSpace, "pool %s (%s) is full: %d MiB of %d MiB are left: %w",
			p.name, p.dir, c.Available>>20, c.Total>>20, err)
	}
	if errors.Is(err, linux.EFBIG) {
		return fault.New(fault.OutOfRange, "pool %s: the file system of %s does not hold files that large: %w", p.name, p.dir, err)
	}
	return err
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
