// Package poolhome keeps a pool from being taken for another directory that lies at
// its path: the bare mount point of a disk that is not mounted, or another disk.
//
// A pool's directory has an identity, in the file pool.json, and the node's state says
// which identity belongs to the pool's name. While the directory has another one, or
// none, nothing is made there and the pool's calls fail with fault.Unavailable. It is
// looked for at each call, so that the pool is there when its disk is. The same holds for
// a pool that keeps its name and is configured in another directory: it is there if it was
// moved, with its identity, or if it had no volumes.
package poolhome

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// file is the name of the identity in a pool's directory.
const file = "pool.json"

var (
	identityType = record.Type{Kind: "crust-csi.pool", Version: 1}
	knownType    = record.Type{Kind: "crust-csi.known-pool", Version: 1}
)

// identity is what a pool's directory says.
type identity struct {
	ID string `json:"id"`
}

// known is what the node's state says.
type known struct {
	ID  string `json:"id"`
	Dir string `json:"dir"`
}

// Options of Open.
type Options struct {
	Name, Dir string
	State     string       // the directory of what the node knows of its pools
	Log       *slog.Logger // nil for nobody
	// Open opens the directory, which is the pool's.
	Open func() (volume.Pool, error)
	// Empty is nil if a directory that was the pool's is proven to hold no volume and no
	// snapshot. It writes nothing. nil: nothing is proven.
	Empty func(dir string) error
}

// place is where the identity's file was seen.
type place struct {
	major, minor uint32
	ino          uint64
}

// Pool is a pool that may be away.
type Pool struct {
	o   Options
	id  string // empty: its directory takes no identity, so any will do
	was string // the directory where it was, while that is not the configured one

	looked atomic.Bool // the first look at the disk has come back

	mu    sync.Mutex  // held while the disk is looked at, which may hang
	inner volume.Pool // nil until it was there once
	seen  place
	said  bool // the log has that it is away

	recovery  sync.Mutex
	thaw      volume.Thaw // what Recover was given; nil before that
	recovered bool

	once  atomic.Pointer[volume.Pool] // inner, for who must not wait for the disk
	asked asked
}

// patience is how long Open waits for the pool's disk.
const patience = 5 * time.Second

// Open takes a pool. One that is away, cannot be used or has a disk that does not answer is no error, unless it was
// never there: the first time, the directory is made and gets an identity.
func Open(o Options) (*Pool, error) {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	p := &Pool{o: o}
	_, err := os.Lstat(p.statePath())
	before := !errors.Is(err, fs.ErrNotExist)
	looked := make(chan error, 1)
	go func() {
		err := p.firstLook(before)
		p.looked.Store(true)
		looked <- err
	}()
	select {
	case err = <-looked:
	case <-time.After(patience):
		o.Log.Error("a pool's disk does not answer; everything else goes on without it", "pool", o.Name, "directory", o.Dir)
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// firstLook gives an error only if the driver has to end.
func (p *Pool) firstLook(before bool) error {
	p.mu.Lock()
	err := p.identify()
	if err != nil {
		p.id = nobody // for a look that comes back late: no directory is the pool's
	}
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("pool %s: %w", p.o.Name, err)
	}
	if _, err = p.enter(); before {
		return nil
	}
	return err
}

func (p *Pool) path() string { return filepath.Join(p.o.Dir, file) }

// Known gives the directories of the pools that a node has or had, by their names: see Options.State. What cannot be read
// is among the errors.
func Known(state string) (dirs map[string]string, err error) {
	names, err := record.Names(state)
	dirs = map[string]string{}
	for _, name := range names {
		var k known
		if rerr := knownType.Read(filepath.Join(state, name+record.Extension), &k); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		dirs[name] = k.Dir
	}
	return dirs, err
}

func (p *Pool) statePath() string { return filepath.Join(p.o.State, p.o.Name+record.Extension) }

// nobody is the identity of no directory: which one is the pool's is not known any more.
const nobody = "-"

// identify learns which identity is the pool's.
func (p *Pool) identify() error {
	var k known
	err := knownType.Read(p.statePath(), &k)
	if err == nil && k.ID == "" {
		err = fmt.Errorf("%s names no identity", p.statePath())
	}
	switch {
	case err == nil && k.Dir == p.o.Dir:
		p.id = k.ID
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return p.first(false)
	case linux.Short(err):
		return err // it says nothing about the record
	case err != nil:
		p.o.Log.Warn("which directory is the pool's is not known any more; the one that has an identity is taken", "pool", p.o.Name, "error", err)
		return p.first(true)
	}
	if i, err := readFrom(k.Dir); err == nil && i.ID == k.ID && p.o.Empty != nil && p.o.Empty(k.Dir) == nil {
		p.o.Log.Info("the pool lies in another directory now; it had no volumes", "pool", p.o.Name, "directory", p.o.Dir, "was", k.Dir)
		return p.first(false)
	}
	p.id, p.was = k.ID, k.Dir
	return nil
}

// first takes the directory that is there for the pool's. A pool that was somewhere
// before has an identity; its bare mount point has none, and is not given one.
func (p *Pool) first(before bool) error {
	here, err := p.read()
	if errors.Is(err, fs.ErrNotExist) {
		if before {
			p.id = nobody
			return nil
		}
		here = identity{ID: rand.Text()}
		if err = os.MkdirAll(p.o.Dir, 0o700); err == nil {
			err = identityType.Write(p.path(), here)
		}
		if errors.Is(err, linux.ENOSPC) || errors.Is(err, linux.EROFS) {
			p.o.Log.Warn("the pool's directory takes no identity: another one at its place would not be noticed", "pool", p.o.Name, "error", err)
			return nil
		}
	}
	if err != nil {
		return err
	}
	return p.learn(here.ID)
}

// learn notes that the directory with this identity is the pool's.
func (p *Pool) learn(id string) error {
	if err := os.MkdirAll(p.o.State, 0o700); err != nil {
		return err
	}
	if err := knownType.Write(p.statePath(), known{ID: id, Dir: p.o.Dir}); err != nil {
		return err
	}
	p.id, p.was = id, ""
	return nil
}

func (p *Pool) read() (identity, error) { return readFrom(p.o.Dir) }

func readFrom(dir string) (identity, error) {
	var i identity
	path := filepath.Join(dir, file)
	err := identityType.Read(path, &i)
	if err == nil && i.ID == "" {
		err = fmt.Errorf("%s names no identity", path)
	}
	return i, err
}

// here gives the pool if its directory is there. Nobody waits for a disk that has not answered since the start.
func (p *Pool) here() (volume.Pool, error) {
	if !p.looked.Load() {
		return nil, fault.New(fault.Unavailable, "pool %s has not answered since the driver was started, so its disk or server does not "+
			"answer: see the kernel's log (dmesg)", p.o.Name)
	}
	return p.enter()
}

func (p *Pool) enter() (volume.Pool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.look()
	if err == nil && p.inner != nil && !p.recovered {
		p.recover()
	}
	if err == nil && p.inner == nil {
		err = p.open()
	}
	if err != nil {
		if !p.said {
			p.said = true
			p.o.Log.Error("a pool is away", "error", err)
		}
		return nil, err
	}
	if p.said {
		p.said = false
		p.o.Log.Info("a pool is there again", "pool", p.o.Name, "directory", p.o.Dir)
	}
	return p.inner, nil
}

// open opens the directory, which is the pool's.
func (p *Pool) open() error {
	inner, err := p.o.Open()
	if err != nil {
		return p.unusable(err)
	}
	p.recovery.Lock()
	defer p.recovery.Unlock()
	if p.thaw != nil {
		if err = inner.Recover(p.thaw); err != nil {
			return p.unusable(errors.Join(err, inner.Close()))
		}
	}
	p.recovered = p.thaw != nil
	p.inner = inner
	p.once.Store(&inner)
	return nil
}

// unusable is an error of a pool that is there. The next call tries again.
func (p *Pool) unusable(err error) error {
	return fault.New(fault.Unavailable, "pool %s at %s cannot be used: %w", p.o.Name, p.o.Dir, err)
}

// look tells whether the directory is the pool's.
func (p *Pool) look() error {
	if p.id == "" {
		return nil
	}
	st, err := linux.StatxPath(p.path())
	now := place{st.DevMajor, st.DevMinor, st.Ino}
	if err == nil && now == p.seen {
		return nil
	}
	p.seen = place{}
	var i identity
	if err == nil {
		i, err = p.read()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return p.away(errors.New("that directory is no pool, as if its disk were not mounted"))
	case err != nil:
		return p.away(err)
	case i.ID != p.id && p.id != nobody:
		return p.away(errors.New("the pool in that directory is another one"))
	case p.was != "" && !p.moved():
		return p.away(errors.New("its volumes are still in " + p.was + ", as if they were being moved, or that is out of sight"))
	case p.id == nobody || p.was != "":
		if err := p.learn(i.ID); err != nil {
			return fault.New(fault.Unavailable, "pool %s: that it is at %s cannot be noted: %w", p.o.Name, p.o.Dir, err)
		}
	}
	p.seen = now
	return nil
}

// moved tells whether nothing of the pool is left where it was. Half of a pool is no pool: what has not arrived would
// count as deleted.
func (p *Pool) moved() bool {
	was, err := linux.StatxPath(filepath.Join(p.was, file))
	if now, nerr := linux.StatxPath(p.path()); err == nil && nerr == nil && was.Ino == now.Ino && was.DevMajor == now.DevMajor &&
		was.DevMinor == now.DevMinor {
		return true // another path of the same directory
	}
	return p.o.Empty != nil && p.o.Empty(p.was) == nil
}

// away says why the pool is not there, and the way out.
func (p *Pool) away(why error) error {
	way := "Mount its disk there"
	if p.was != "" {
		way = "It was in " + p.was + ": configure that directory again, or move all of its content to the new one, with " + file
	}
	return fault.New(fault.Unavailable, "pool %s is not at %s: %w. %s; nothing is made or deleted until then. If all of it has been moved, or this is a new pool in its place, remove %s and restart the driver",
		p.o.Name, p.o.Dir, why, way, p.statePath())
}

// known gives the pool where it was there once, whether or not it is now. It waits for no
// disk.
func (p *Pool) known() volume.Pool {
	if inner := p.once.Load(); inner != nil {
		return *inner
	}
	return nil
}

// Away tells why the pool is away, nil while it is there.
func (p *Pool) Away() error {
	_, err := p.here()
	return err
}
