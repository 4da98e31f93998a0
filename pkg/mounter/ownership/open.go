package ownership

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// task is a directory to open and read, or one to read on.
type task struct {
	dir  *shared
	name linux.Name // nil: read on in dir
}

// mostOpen is about how many directories a walk has open. A pod decides how many wait to be read on: each level of a deep tree
// may have one.
const mostOpen = 1000

// shared is a directory that tasks refer to. It is open while a task runs that refers to it.
type shared struct {
	linux.Dir
	users  int // tasks
	busy   int // of those, how many run
	closed atomic.Bool
	handle linux.DirHandle // of one that is closed
	again  sync.Mutex      // held while it is opened again
}

// drop ends a task that ran, and tasks with the same directory that nobody will run.
func (w *walk) drop(s *shared, tasks int) error {
	w.mu.Lock()
	s.busy--
	err := w.forget(s, tasks)
	w.mu.Unlock()
	return err
}

func (w *walk) forget(s *shared, tasks int) error {
	s.users -= tasks
	if s.users > 0 || s.closed.Load() {
		return nil
	}
	w.open--
	return s.Close()
}

// opened takes note of a directory that one running task has open.
func (w *walk) opened(d linux.Dir) *shared {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open++
	return &shared{Dir: d, users: 1, busy: 1}
}

// park closes directories that are needed last, until few enough are open.
func (w *walk) park() {
	most := cmp.Or(w.most, mostOpen)
	w.parked = min(w.parked, len(w.stack))
	if w.open <= most {
		return
	}
	kept := -1 // the first that stays open
	for i := w.parked; i < len(w.stack) && w.open > most/2; i++ {
		s := w.stack[i].dir
		if s.busy > 0 && kept < 0 {
			kept = i
		}
		if s.busy > 0 || s.closed.Load() {
			continue
		}
		if err := w.close(s); err != nil {
			w.most = math.MaxInt // a file system without handles, or no CAP_DAC_READ_SEARCH
			return
		}
		s.closed.Store(true)
		w.open--
		w.parked = i
	}
	if kept >= 0 {
		w.parked = kept
	}
}

// close closes a directory that can be opened again, which the first one has to show.
func (w *walk) close(s *shared) error {
	handle, err := s.Handle()
	if err == nil && !w.handles {
		var again linux.Dir
		if again, err = w.top.OpenHandle(handle); err == nil {
			w.handles = true
			err = again.Close()
		}
	}
	if err != nil {
		return err
	}
	s.handle = handle
	return s.Close()
}

// reopen opens the directory of a task that is to run.
func (w *walk) reopen(s *shared) error {
	s.again.Lock()
	defer s.again.Unlock()
	if !s.closed.Load() {
		return nil
	}
	dir, err := w.top.OpenHandle(s.handle)
	if err != nil {
		return err
	}
	s.Dir = dir
	s.closed.Store(false)
	w.mu.Lock()
	w.open++
	w.mu.Unlock()
	return nil
}
