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
	marked bool // the record says that a walk has begun
	clean  bool // the record says that all files have the group

	mu      sync.Mutex
	wake    *sync.Cond
	stack   []task // last in, first out, so that few directories are open at once
	open    atomic.Int64
	most    int64 // limit of open directories; 0 means mostOpen
	workers int   // goroutines that read directories; 0 means one for each processor, and four at least
	running int
	err     error
	over    atomic.Bool // err is set

	links  seen        // files with more than one name that were examined
	missed atomic.Bool // such a file may not have the group
}

// seen remembers files, so that each is examined once. Pods decide how many files have a second
// name, so it keeps only the first million. To examine a file again does no harm.
type seen struct {
	mu    sync.Mutex
	files map[file]bool
	most  int // 0 means a million
}

// before reports whether the file is known, and remembers it.
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

// forget makes the next name of a file count as its first.
func (s *seen) forget(f file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.files, f)
}

// file identifies an inode. A file system may have several subvolumes, so it includes the
// device.
type file struct{ dev, ino uint64 }

// gone reports whether err means that somebody removed or replaced a name after it was read.
func gone(err error) bool {
	return errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ENOTDIR) || errors.Is(err, linux.ELOOP)
}

// task is a directory to open and read, or an open directory to continue reading.
type task struct {
	dir  *shared
	name linux.Name // nil: continue with dir
}

// mostOpen limits the directories that a walk has open. Each level of a deep tree may have one
// that waits to be continued. A pod decides how deep the tree is, and the driver's descriptors
// serve all volumes.
const mostOpen = 10_000

// shared is an open directory, referenced by tasks.
type shared struct {
	linux.Dir
	users atomic.Int32
	open  *atomic.Int64
}

// opened counts a newly open directory, with one reference.
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
	for range cmp.Or(w.workers, max(4, runtime.GOMAXPROCS(0))) {
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

// next waits for a task. It returns false if there is none and none can come.
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

// do reads one buffer of a directory's entries. The rest of the directory goes back on the
// stack, below its sub-directories.
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
			return errors.Join(fault.New(fault.State,
				"directory %q: more than %d directories would be open at once, for the tree is that deep; "+
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

// visit gives one entry to the group, and reports whether it is a directory to descend into.
func (w *walk) visit(dir linux.Dir, name linux.Name, looked *int64) (bool, error) {
	i, err := dir.Stat(name)
	if errors.Is(err, linux.ENOENT) {
		return false, nil // removed meanwhile: the volume is in use
	}
	if err != nil {
		return false, err
	}
	if i.MountRoot {
		return false, nil // another file system
	}
	if i.Links > 1 && !i.IsDir() && w.links.before(file{i.Dev, i.Ino}) {
		return false, nil
	}
	*looked++
	chgrp, chmod, mode := wanted(i, w.gid)
	if !chgrp && !chmod {
		return i.IsDir(), nil
	}
	// A directory's setgid bit does no harm to a file that has taken its place: only its group could use it.
	if mode&linux.ModeSetuid != 0 || !i.IsDir() && mode&linux.ModeSetgid != 0 {
		err = w.changeExactly(dir, name, i, mode)
	} else {
		err = w.change(chgrp, chmod, func() error { return dir.Chgrp(name, w.gid) }, func() error { return dir.Chmod(name, mode) })
	}
	switch {
	case gone(err):
		if i.Links > 1 && !i.IsDir() {
			w.links.forget(file{i.Dev, i.Ino}) // it may have other names
			w.missed.Store(true)               // which were passed by meanwhile
		}
		return false, nil
	case errors.Is(err, linux.EPERM) && i.Fixed, errors.Is(err, linux.EROFS) && i.Dev != w.dev:
		// chattr +i or +a, or a read-only snapshot within a btrfs. Nobody can change such a
		// file, and it must not keep the volume from its pods.
		w.progress.refuse(name.String())
		err = nil
	}
	return i.IsDir(), err
}

func (w *walk) changeExactly(dir linux.Dir, name linux.Name, i linux.Inode, mode uint32) error {
	if err := errors.Join(w.markDirty(), failpoint.Err("ownership.change")); err != nil {
		return err
	}
	for first := i; ; {
		changed, err := dir.ChangeExactly(name, i, w.gid, mode)
		if err != nil || changed {
			w.progress.Changed.Add(1)
			return err
		}
		// The name now belongs to another file, or the file's mode has changed.
		if i, err = dir.Stat(name); err != nil {
			return err
		}
		_, _, mode = wanted(i, w.gid)
		if i.IsDir() && (i.Dev != first.Dev || i.Ino != first.Ino) || i.IsSymlink() {
			return nil // it appeared during the walk, from a pod that already has the group
		}
	}
}

func (w *walk) change(chgrp, chmod bool, group, mode func() error) error {
	if err := w.markDirty(); err != nil {
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

// markDirty marks the record as dirty before the first change.
func (w *walk) markDirty() error {
	w.dirty.Lock()
	defer w.dirty.Unlock()
	if w.marked {
		return nil
	}
	w.marked, w.clean = true, false
	return Record{Group: w.gid}.write(w.top)
}
