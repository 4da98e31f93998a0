package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Manager keeps the sandboxes and their volumes.
type Manager struct {
	Config
	boot  string
	store store
	bad   map[string]error // unusable records, by path; constant after New

	mu        sync.Mutex // guards what follows; never held while calling a sandbox
	sandboxes map[string]*registered
	busy      map[string]string // key of a running operation, and its name
	tasks     sync.WaitGroup

	watchers events
	looks    looks
}

// registered is one sandbox.
type registered struct {
	current atomic.Pointer[Sandbox]
	writing sync.Mutex // held while the record is written
	record  sandboxRecord
	closing bool
	ended   chan struct{} // closed when the sandbox has provably ended
	left    chan struct{} // closed when nobody watches it any more
}

func (b *registered) sandbox() Sandbox { return *b.current.Load() }

func (b *registered) set(s Sandbox) { b.current.Store(&s) }

func (b *registered) hasEnded() bool {
	select {
	case <-b.ended:
		return true
	default:
		return false
	}
}

func (m *Manager) opening(b *registered) (Opening, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := Opening{Spec: b.record.Spec, Ended: b.ended}
	if o.PID == 0 {
		o.PID = b.record.Process.PID // that the backend found
	}
	for _, r := range b.record.Volumes {
		v, err := r.volume()
		if err != nil {
			return o, err
		}
		o.Volumes = append(o.Volumes, v)
	}
	return o, nil
}

func (m *Manager) open(ctx context.Context, b *registered) (Sandbox, error) {
	o, err := m.opening(b)
	if err != nil {
		return nil, err
	}
	return m.Backend.Open(ctx, o)
}

func newRegistered(r sandboxRecord) *registered {
	return &registered{record: r, ended: make(chan struct{}), left: make(chan struct{})}
}

// reachTime bounds how long a start waits for the sandboxes of an earlier process. The rest is
// retried in the background.
const reachTime = 10 * time.Second

// New takes over the sandboxes of an earlier process. One that cannot be reached keeps its volumes
// and is tried again. One that has ended is cleaned up.
func New(ctx context.Context, c Config) (*Manager, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	c.Timeout, c.OwnershipTimeout = cmp.Or(c.Timeout, time.Minute), cmp.Or(c.OwnershipTimeout, 10*time.Minute)
	boot, err := mounter.BootID()
	if err != nil {
		return nil, err
	}
	m := &Manager{Config: c, boot: boot, store: newStore(filepath.Join(c.StateDir, "sandboxes")), sandboxes: map[string]*registered{},
		busy: map[string]string{}}
	var records []sandboxRecord
	if records, m.bad, err = m.store.load(); err != nil {
		return nil, err
	}
	for path, err := range m.bad {
		c.Log.Error("a record cannot be used; everything else goes on without it, and devices that are in use are given to nobody",
			"file", path, "error", err)
	}
	for _, r := range records {
		if r.BootID == boot && r.Kind != c.Backend.Kind() {
			return nil, fault.New(fault.State,
				"%s has sandboxes of kind %q (%s), and the backend is %q: have one of that kind, or another state directory",
				c.StateDir, r.Kind, r.Spec.ID, c.Backend.Kind())
		}
	}
	for _, r := range records {
		if r.BootID == boot {
			continue
		}
		forget := m.forget // a reboot ends every sandbox
		if r.Kind != c.Backend.Kind() {
			forget = func(s Spec) error { return m.store.remove(s.ID) } // what it left is another backend's
		}
		if err := forget(r.Spec); err != nil {
			c.Log.Error("what a sandbox before the reboot left cannot be removed; the next start tries again", "sandbox_id", r.Spec.ID,
				"error", err)
		}
	}
	var all sync.WaitGroup
	var failed atomic.Pointer[error]
	for _, r := range records {
		if r.BootID != boot {
			continue
		}
		if r.Volumes == nil {
			r.Volumes = map[string]volumeRecord{}
		}
		b := newRegistered(r)
		all.Go(func() {
			pidfd, err := m.reopen(ctx, b)
			if err != nil {
				failed.CompareAndSwap(nil, &err)
				return
			}
			m.take(b, pidfd)
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		m.detach()
		return nil, errors.Join(*err, ctx.Err())
	}
	return m, nil
}

// forget removes what a sandbox left, and then its record: without it, nobody would try again.
func (m *Manager) forget(spec Spec) error {
	if err := m.Backend.Forget(spec); err != nil {
		return err
	}
	return m.store.remove(spec.ID)
}

// reopen takes over a sandbox of an earlier process, reachable or not.
func (m *Manager) reopen(ctx context.Context, b *registered) (pidfd *os.File, err error) {
	id := b.record.Spec.ID
	m.Log.Info("a sandbox of an earlier process", "sandbox_id", id, "volumes", len(b.record.Volumes))
	if b.record.Process.PID != 0 {
		pidfd, err = b.record.Process.find()
		if errors.Is(err, ErrGone) {
			m.Log.Info("a sandbox of an earlier process has ended", "sandbox_id", id, "error", err)
			close(b.ended)
		} else if linux.Short(err) {
			return nil, err // not about the process
		} else if err != nil {
			m.Log.Error("a sandbox of an earlier process cannot be looked at; it keeps what it has", "sandbox_id", id, "error", err)
			b.set(unreachable{err})
			return nil, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, min(reachTime, m.Timeout))
	defer cancel()
	sb, err := m.open(ctx, b)
	if err != nil {
		m.Log.Error("a sandbox of an earlier process cannot be reached; it keeps what it has", "sandbox_id", id, "error", err)
		sb = unreachable{err}
	}
	b.set(sb)
	return pidfd, nil
}

// Stop detaches from all sandboxes. They go on with their volumes.
func (m *Manager) Stop() {
	m.detach()
	if err := m.Backend.Close(); err != nil {
		m.Log.Warn("closing the backend", "error", err)
	}
}

func (m *Manager) detach() {
	m.mu.Lock()
	sandboxes := slices.Collect(maps.Values(m.sandboxes))
	m.sandboxes = map[string]*registered{}
	m.mu.Unlock()
	for _, b := range sandboxes {
		close(b.left)
	}
	m.tasks.Wait()
	for _, b := range sandboxes {
		b.sandbox().Detach()
	}
}

// take watches a sandbox from now on.
func (m *Manager) take(b *registered, pidfd *os.File) {
	m.mu.Lock()
	m.sandboxes[b.record.Spec.ID] = b
	m.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	m.tasks.Go(func() { <-b.left; cancel() })
	m.watch(ctx, b, pidfd)
	m.tasks.Go(func() { m.look(ctx, b, pidfd != nil) })
}

// watch waits in the background for the end of a sandbox's process, if there is one.
func (m *Manager) watch(ctx context.Context, b *registered, pidfd *os.File) {
	if pidfd == nil {
		return
	}
	m.tasks.Go(func() {
		defer pidfd.Close()
		if linux.WaitEnd(ctx, pidfd) {
			m.Log.Info("a sandbox has ended", "sandbox_id", b.record.Spec.ID)
			close(b.ended)
		}
	})
}

// reach opens a sandbox again that could not be reached. watched: its process is watched, or has
// ended. A process that could not be looked at comes first: nobody would see its end, and its pid
// may be another's.
func (m *Manager) reach(ctx context.Context, b *registered, watched *bool) (Sandbox, error) {
	if !*watched {
		pidfd, err := b.record.Process.find()
		switch {
		case errors.Is(err, ErrGone):
			close(b.ended)
		case err != nil:
			return nil, err
		}
		m.watch(ctx, b, pidfd)
		*watched = true
	}
	ctx, cancel := context.WithTimeout(ctx, min(reachTime, m.Timeout))
	defer cancel()
	return m.open(ctx, b)
}

// look reconnects to a sandbox that could not be reached, and cleans up after one that has ended.
func (m *Manager) look(ctx context.Context, b *registered, watched bool) {
	const shortest, longest = 50 * time.Millisecond, 30 * time.Second
	id := b.record.Spec.ID
	pause := func(wait time.Duration, or <-chan struct{}) {
		select {
		case <-time.After(wait):
		case <-or:
		case <-ctx.Done():
		}
	}
	watched = watched || b.record.Process.PID == 0 || b.hasEnded()
	for wait := shortest; ctx.Err() == nil; wait = min(2*wait, longest) {
		if _, away := b.sandbox().(unreachable); !away {
			break
		}
		sb, err := m.reach(ctx, b, &watched)
		if err == nil {
			m.Log.Info("a sandbox can be reached again", "sandbox_id", id)
			b.set(sb)
			break
		}
		select {
		case <-b.ended:
			b.set(departed{unreachable{err}, func() error { return m.Backend.Forget(b.record.Spec) }})
		default:
			pause(wait, b.ended)
		}
	}
	select {
	case <-b.ended:
	case <-ctx.Done():
		return
	}
	for wait := shortest; ctx.Err() == nil; wait = min(2*wait, longest) {
		err := m.deregister(ctx, id, "it ended")
		if err == nil {
			return
		}
		m.Log.Warn("what a sandbox that ended has left cannot be cleaned up yet", "sandbox_id", id, "error", err)
		if _, left := b.sandbox().(departed); left { // it may have been impossible for a moment to open it, and only that unmounts
			switch sb, err := m.reach(ctx, b, &watched); {
			case err != nil:
			case ctx.Err() != nil: // it was deregistered meanwhile
				sb.Detach()
			default:
				b.set(sb)
			}
		}
		pause(wait, nil)
	}
}

// begin marks operations as running. A second one on a key is ABORTED.
func (m *Manager) begin(what string, keys ...string) (func(), error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		if other, ok := m.busy[k]; ok {
			return nil, fault.New(fault.Busy, "%s: %s is running; try again", k, other)
		}
	}
	for _, k := range keys {
		m.busy[k] = what
	}
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, k := range keys {
			delete(m.busy, k)
		}
	}, nil
}

// unusable returns the error for a sandbox whose record is unusable, and nil for any other.
func (m *Manager) unusable(id string) error {
	if err := m.bad[m.store.path(id)]; err != nil {
		return fmt.Errorf("sandbox %s: %w; or end the sandbox, move the file away, and start crustd again", id, err)
	}
	return nil
}

func (m *Manager) find(id string) (*registered, error) {
	if err := m.unusable(id); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.sandboxes[id]
	if !ok || b.closing {
		return nil, fault.New(fault.NotFound, "sandbox %q is not registered", id)
	}
	return b, nil
}

func (m *Manager) volume(id, source string) (*registered, Volume, volumeRecord, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, Volume{}, volumeRecord{}, err
	}
	m.mu.Lock()
	r, ok := b.record.Volumes[source]
	m.mu.Unlock()
	if !ok || r.State == publishing {
		return nil, Volume{}, r, fault.New(fault.NotFound, "volume %s is not published in sandbox %s", source, id)
	}
	v, err := r.volume()
	return b, v, r, err
}

// keep changes a volume's record, first on disk.
func (m *Manager) keep(b *registered, source string, r *volumeRecord) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	m.mu.Lock()
	was, next := b.record, b.record
	next.Volumes = maps.Clone(was.Volumes)
	known := m.sandboxes[next.Spec.ID] == b
	m.mu.Unlock()
	if !known {
		return fault.New(fault.State, "sandbox %s was deregistered, or this server is stopping", next.Spec.ID)
	}
	if r == nil {
		delete(next.Volumes, source)
	} else {
		next.Volumes[source] = *r
	}
	next, err := m.store.change(was, next)
	m.mu.Lock()
	b.record = next
	m.mu.Unlock()
	return err
}
