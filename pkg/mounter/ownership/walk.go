package ownership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// walk visits every directory below top once.
type walk struct {
	gid      uint32
	dev      uint64 // of the root
	progress *Progress
	top      linux.Dir

	dirty  sync.Mutex
	soiled bool // the record says that a walk has begun
	clean  bool // the record says that all is well

	mu      sync.Mutex
	wake    *sync.Cond
	stack   []task // last in, first out: few directories are open at once
	open    atomic.Int64
	most    int64 // directories that may be open at once; mostOpen where it is 0
	running int
	err     error
	over    atomic.Bool // err is set

	links seen // files with more than one name that were looked at
}

// seen remembers files, so that each is looked at once. A pod decides how many have a second name, so
// it forgets those that come after the first million: to look at a file again changes nothing.
type seen struct {
	mu    sync.Mutex
	files map[file]bool
	most  int // a million where it is 0
}

// before tells whether the file is known, and remembers it.
func (s *seen) before(f file) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files[f] {
		return true
	}
	if len(s.files) < cmp.Or(s.most, 1_000_000) {
		if s.files == nil {
			s.files = map[file]bool{}
		}
		s.files[f] = true
	}
	return false
}

// file is an inode of one of the subvolumes that a file system may have.
type file struct{ dev, ino uint64 }

// gone are the errors about a name that another pod has removed, or given to
// something else, since it was read.
func gone(err error) bool {
	return errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ENOTDIR) || errors.Is(err, linux.ELOOP)
}

// task is a directory to open and read, or an open one to read on.
type task struct {
	dir  *shared
	name linux.Name // nil: read on in dir
}

// mostOpen bounds the directories that a walk has open. Each level of a deep tree may have one that waits to be read on, and a
// pod decides how deep that is: the driver's descriptors are for all volumes.
const mostOpen = 10_000

// shared is an open directory that tasks refer to.
type shared struct {
	linux.Dir
	users atomic.Int32
	open  *atomic.Int64
}

// opened takes note of a directory, for one task.
func (w *walk) opened(d linux.Dir) *shared {
	s := &shared{Dir: d, open: &w.open}
	s.users.Store(1)
	w.open.Add(1)
	return s
}

func (s *shared) release() error {
	if s.users.Add(-1) > 0 {
		return nil
	}
	s.open.Add(-1)
	return s.Close()
}

func (w *walk) run(ctx context.Context) error {
	w.wake = sync.NewCond(&w.mu)
	root, err := w.top.Open(linux.Name(".\x00"))
	if err != nil {
		return err
	}
	w.stack = []task{{dir: w.opened(root)}}
	stop := context.AfterFunc(ctx, func() { w.fail(context.Cause(ctx)) })
	defer stop()
	var all sync.WaitGroup
	for range max(4, runtime.GOMAXPROCS(0)) {
		all.Go(func() {
			defer func() { // a bug here must not end the process that serves all volumes
				if p := recover(); p != nil {
					w.fail(fmt.Errorf("panic: %v", p))
				}
			}()
			buf := make([]byte, 128<<10)
			for {
				t, ok := w.next()
				if !ok {
					return
				}
				if err := w.do(t, buf); err != nil {
					w.fail(err)
				}
				w.ended()
			}
		})
	}
	all.Wait()
	for _, t := range w.stack { // of a walk that failed
		w.err = errors.Join(w.err, t.dir.release())
	}
	return w.err
}

func (w *walk) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.over.Store(true)
	w.wake.Broadcast()
}

// next waits for a task; false when there is none and none can come.
func (w *walk) next() (task, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.stack) == 0 && w.running > 0 && w.err == nil {
		w.wake.Wait()
	}
	if len(w.stack) == 0 || w.err != nil {
		w.wake.Broadcast()
		return task{}, false
	}
	t := w.stack[len(w.stack)-1]
	w.stack = w.stack[:len(w.stack)-1]
	w.running++
	return t, true
}

func (w *walk) ended() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running--
	if w.running == 0 && len(w.stack) == 0 {
		w.wake.Broadcast()
	}
}

func (w *walk) push(tasks []task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stack = append(w.stack, tasks...)
	w.wake.Broadcast()
}

// do reads one buffer of a directory's entries. What is left of the directory
// goes back to the stack below its sub-directories.
func (w *walk) do(t task, buf []byte) error {
	dir := t.dir
	if t.name != nil {
		sub, err := dir.Open(t.name)
		if gone(err) {
			return dir.release()
		}
		if err != nil {
			err = fmt.Errorf("directory %q: %w", t.name, err)
		}
		if err := errors.Join(err, dir.release()); err != nil {
			return err
		}
		dir = w.opened(sub)
		if most := cmp.Or(w.most, mostOpen); w.open.Load() > most {
			return errors.Join(fault.New(fault.State, "directory %q: more than %d directories would be open at once, for the tree is that deep; "+
				"make it less deep, in a pod without fsGroup", t.name, most), dir.release())
		}
	}
	n, err := dir.Read(buf)
	if errors.Is(err, linux.ENOENT) {
		n, err = 0, nil // the directory was removed
	}
	if err != nil || n == 0 {
		return errors.Join(err, dir.release())
	}
	tasks := []task{{dir: dir}}
	var looked int64
	defer func() { w.progress.Looked.Add(looked) }()
	for rest := buf[:n]; len(rest) > 0; {
		var name linux.Name
		name, rest = linux.NextEntry(rest)
		if s := name.String(); s == "." || s == ".." {
			continue
		}
		sub, err := w.visit(dir.Dir, name, &looked)
		if err != nil {
			return errors.Join(fmt.Errorf("%q: %w", name, err), release(dir, len(tasks)))
		}
		if sub {
			dir.users.Add(1)
			tasks = append(tasks, task{dir: dir, name: append(linux.Name(nil), name...)})
		}
		if w.over.Load() {
			return release(dir, len(tasks))
		}
	}
	w.push(tasks)
	return nil
}

func release(dir *shared, times int) error {
	var err error
	for range times {
		err = errors.Join(err, dir.release())
	}
	return err
}

// visit gives one entry to the group, and tells whether it is a directory to
// go into.
func (w *walk) visit(dir linux.Dir, name linux.Name, looked *int64) (bool, error) {
	i, err := dir.Stat(name)
	if errors.Is(err, linux.ENOENT) {
		return false, nil // of a volume that is in use: it was removed just now
	}
	if err != nil {
		return false, err
	}
	if i.MountRoot {
		return false, nil // of another file system
	}
	if i.Links > 1 && !i.IsDir() && w.links.before(file{i.Dev, i.Ino}) {
		return false, nil
	}
	*looked++
	chgrp, chmod, mode := wanted(i, w.gid)
	if !chgrp && !chmod {
		return i.IsDir(), nil
	}
	if !i.IsDir() && mode&(linux.ModeSetuid|linux.ModeSetgid) != 0 {
		err = w.changeExactly(dir, name, i, mode)
	} else {
		err = w.change(chgrp, chmod, func() error { return dir.Chgrp(name, w.gid) }, func() error { return dir.Chmod(name, mode) })
	}
	switch {
	case gone(err):
		return false, nil
	case errors.Is(err, linux.EPERM) && i.Fixed, errors.Is(err, linux.EROFS) && i.Dev != w.dev:
		// chattr +i or +a, or in a read-only snapshot within a btrfs: nobody can
		// change that, and it must not keep the volume from its pods.
		w.progress.refuse(name.String())
		err = nil
	}
	return i.IsDir(), err
}

func (w *walk) changeExactly(dir linux.Dir, name linux.Name, i linux.Inode, mode uint32) error {
	if err := w.soil(); err != nil {
		return err
	}
	for {
		changed, err := dir.ChangeExactly(name, i, w.gid, mode)
		if err != nil || changed {
			w.progress.Changed.Add(1)
			return err
		}
		// Another file, or the same with another mode, has the name now.
		if i, err = dir.Stat(name); err != nil {
			return err
		}
		_, _, mode = wanted(i, w.gid)
		if i.IsDir() || i.IsSymlink() {
			return nil // it came in mid-walk, from a pod that has the group already
		}
	}
}

func (w *walk) change(chgrp, chmod bool, group, mode func() error) error {
	if err := w.soil(); err != nil {
		return err
	}
	if err := failpoint.Err("ownership.change"); err != nil {
		return err
	}
	w.progress.Changed.Add(1)
	if chgrp {
		if err := group(); err != nil {
			return err
		}
	}
	if chmod {
		return mode()
	}
	return nil
}

// soil records, before the first change, that the walk has begun.
func (w *walk) soil() error {
	w.dirty.Lock()
	defer w.dirty.Unlock()
	if w.soiled {
		return nil
	}
	w.soiled, w.clean = true, false
	return Record{Group: w.gid}.write(w.top)
}
