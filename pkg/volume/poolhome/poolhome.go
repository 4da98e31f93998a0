// Package poolhome protects a pool from another directory at its path: the bare mount point of
// an unmounted disk, or another disk.
//
// A pool's directory has an identity, in the file pool.json. The node's state records which
// identity belongs to the pool's name. While the directory has another identity or none, the
// pool is unavailable: nothing is made there, and its calls fail with fault.Unavailable. Each
// call checks again, so the pool becomes available with its disk. The same applies to a pool
// that keeps its name and is configured in another directory: it is available if it was moved
// there with its identity, or if it had no volumes.
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
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// file is the name of the identity's file in a pool's directory.
const file = "pool.json"

var (
	identityType = record.Type{Kind: "crust-csi.pool", Version: 1}
	knownType    = record.Type{Kind: "crust-csi.known-pool", Version: 1}
)

// identity is the content of that file.
type identity struct {
	ID string `json:"id"`
}

// Options are the options of Open. Name, Dir, State and Open are required.
type Options struct {
	Name, Dir string
	State     string       // the directory of the node's records of its pools
	Log       *slog.Logger // nil: no log
	// Open opens the directory after it was verified as the pool's.
	Open func() (volume.Pool, error)
	// Empty returns nil if a former directory of the pool provably holds no volume and no
	// snapshot. It writes nothing. If Empty is nil, nothing is proven.
	Empty func(dir string) error
	// Foreign reports whether a device certainly belongs to no volume of any pool of this kind. It does not look at the pool. If Foreign is
	// nil, any device may belong to a pool that is unavailable.
	Foreign func(mounter.Device) (bool, error)
}

// place identifies the inode of the identity's file.
type place struct {
	major, minor uint32
	ino          uint64
}

// Pool is a pool that may be unavailable.
type Pool struct {
	o   Options
	id  string // empty: the directory cannot store an identity, so any directory is accepted
	was string // the former directory, if it differs from the configured one

	looked atomic.Bool // the first access to the disk has returned

	mu    sync.Mutex  // held while the disk is accessed, which may hang
	inner volume.Pool // nil until it was available once
	home  place       // of inner
	seen  place
	said  bool // its absence has been logged

	recovery  sync.Mutex
	thaw      volume.Thaw // the argument of Recover; nil before
	recovered bool

	once  atomic.Pointer[volume.Pool] // inner, for callers that must not wait for the disk
	asked asked
}

// patience is how long Open waits for the pool's disk.
const patience = 5 * time.Second

// Open opens a pool. It is no error if the pool is unavailable or unusable, or if its disk does
// not answer, unless it was never available: the first time, the directory is created and gets
// an identity.
func Open(o Options) (*Pool, error) {
	if o.Name == "" || o.Dir == "" || o.State == "" || o.Open == nil {
		return nil, fault.New(fault.Invalid, "pool %q: poolhome.Options needs Name, Dir, State and Open", o.Name)
	}
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

// firstLook returns an error only if the driver must end.
func (p *Pool) firstLook(before bool) error {
	p.mu.Lock()
	err := p.identify()
	if err != nil {
		p.id = nobody // for a look that returns late: accept no directory
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

func (p *Pool) statePath() string { return recordOf(p.o.State, p.o.Name) }

// nobody is the identity of no directory: the record of the pool's directory is lost.
const nobody = "-"

// identify determines which identity is the pool's.
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
		return err // the error is not about the record
	case err != nil:
		p.o.Log.Warn("which directory is the pool's is not known any more; the one that has an identity is taken",
			"pool", p.o.Name, "error", err)
		return p.first(true)
	}
	if i, err := readFrom(k.Dir); err == nil && i.ID == k.ID && p.o.Empty != nil && p.o.Empty(k.Dir) == nil {
		p.o.Log.Info("the pool lies in another directory now; it had no volumes", "pool", p.o.Name, "directory", p.o.Dir, "was", k.Dir)
		return p.first(false)
	}
	p.id, p.was = k.ID, k.Dir
	return nil
}

// first accepts the existing directory as the pool's. If the pool existed before, its directory
// has an identity; its bare mount point has none, and gets none.
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
			p.o.Log.Warn("the pool's directory takes no identity: another one at its place would not be noticed",
				"pool", p.o.Name, "error", err)
			return nil
		}
	}
	if err != nil {
		return err
	}
	return p.learn(here.ID)
}

// learn records that the directory with this identity is the pool's.
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

// here returns the pool if its directory is there. It does not wait for a disk that has not
// answered since the start.
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

// open opens the directory after it was verified as the pool's.
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
	p.inner, p.home = inner, p.seen
	p.once.Store(&inner)
	return nil
}

// unusable returns the error for a pool whose directory is there but cannot be used. The next
// call tries again.
func (p *Pool) unusable(err error) error {
	return fault.New(fault.Unavailable, "pool %s at %s cannot be used: %w", p.o.Name, p.o.Dir, err)
}

// look verifies that the directory is the pool's.
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
	case p.home != place{} && now != p.home:
		// The pool remembers the volumes of another file system. This one may have been used elsewhere since.
		return fault.New(fault.Unavailable, "pool %s is at %s, but not on the file system that was opened there, as if its disk had been "+
			"exchanged or restored, or had another device number: restart the driver, so that it reads the pool anew", p.o.Name, p.o.Dir)
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

// moved reports whether nothing of the pool is left in its former directory. A partial move
// does not count, because volumes that have not arrived would look deleted.
func (p *Pool) moved() bool {
	was, err := linux.StatxPath(filepath.Join(p.was, file))
	if now, nerr := linux.StatxPath(p.path()); err == nil && nerr == nil && was.Ino == now.Ino && was.DevMajor == now.DevMajor &&
		was.DevMinor == now.DevMinor {
		return true // another path of the same directory
	}
	return p.o.Empty != nil && p.o.Empty(p.was) == nil
}

// away returns an error with the reason why the pool is unavailable, and the remedy.
func (p *Pool) away(why error) error {
	way := "Mount its disk there"
	if p.was != "" {
		way = "It was in " + p.was + ": configure that directory again, or move all of its content to the new one, with " + file
	}
	return fault.New(fault.Unavailable, "pool %s is not at %s: %w. %s; nothing is made or deleted until then. If all of it has been moved, or this is a new pool in its place, remove %s and restart the driver",
		p.o.Name, p.o.Dir, why, way, p.statePath())
}

// known returns the pool if it was available once, whether or not it is now. It does not wait
// for the disk.
func (p *Pool) known() volume.Pool {
	if inner := p.once.Load(); inner != nil {
		return *inner
	}
	return nil
}

// Away returns the reason why the pool is unavailable, or nil.
func (p *Pool) Away() error {
	_, err := p.here()
	return err
}
