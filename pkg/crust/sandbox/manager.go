package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Config of a Manager.
type Config struct {
	StateDir string
	// KubeletDir is the directory that every target lies below.
	KubeletDir string
	Backend    Backend
	Devices    Devices
	Log        *slog.Logger
	// Timeout bounds what is asked of a sandbox: one that never answers must not
	// hold up its callers.
	Timeout time.Duration
}

// Manager knows the sandboxes and what they have.
type Manager struct {
	Config
	boot  string
	store store

	mu    sync.Mutex // guards what follows; never held while a sandbox is asked
	boxes map[string]*box
	busy  map[string]string // key of a running operation, and what it is
	ended bool
	tasks sync.WaitGroup

	watchers events
}

// box is one sandbox.
type box struct {
	sandbox Sandbox
	record  sandboxRecord
	closing bool
	left    chan struct{} // closed when nobody looks after it any more
}

// New takes up the sandboxes of an earlier process. One that cannot be reached
// any more is cleaned up.
func New(ctx context.Context, c Config) (*Manager, error) {
	boot, err := mounter.BootID()
	if err != nil {
		return nil, err
	}
	m := &Manager{Config: c, boot: boot, store: store{filepath.Join(c.StateDir, "sandboxes")}, boxes: map[string]*box{}, busy: map[string]string{}}
	records, err := m.store.load(boot)
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		if r.Volumes == nil {
			r.Volumes = map[string]volumeRecord{}
		}
		sb, err := m.reopen(ctx, r)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if errors.Is(err, ErrGone) {
			c.Log.Info("a sandbox of an earlier process has ended", "sandbox_id", r.Spec.ID, "error", err)
			if err := errors.Join(c.Backend.Forget(r.Spec), m.store.remove(r.Spec.ID)); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			c.Log.Error("a sandbox of an earlier process cannot be reached; it keeps what it has", "sandbox_id", r.Spec.ID, "error", err)
			sb = unreachable{err}
		}
		m.take(sb, r)
	}
	return m, nil
}

func (m *Manager) reopen(ctx context.Context, r sandboxRecord) (Sandbox, error) {
	if r.Spec.PID != 0 && linux.ProcessStart(r.Spec.PID) != r.Started {
		return nil, fmt.Errorf("process %d: %w", r.Spec.PID, ErrGone)
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	return m.Backend.Open(ctx, r.Spec)
}

// Stop lets go of all sandboxes, which go on with their volumes.
func (m *Manager) Stop() {
	m.mu.Lock()
	m.ended = true
	boxes := slices.Collect(maps.Values(m.boxes))
	m.boxes = map[string]*box{}
	m.mu.Unlock()
	for _, b := range boxes {
		close(b.left)
		b.sandbox.Detach()
	}
	m.tasks.Wait()
	if err := m.Backend.Close(); err != nil {
		m.Log.Warn("closing the backend", "error", err)
	}
}

func (m *Manager) take(sb Sandbox, r sandboxRecord) {
	b := &box{sandbox: sb, record: r, left: make(chan struct{})}
	m.mu.Lock()
	m.boxes[r.Spec.ID] = b
	m.mu.Unlock()
	m.tasks.Go(func() {
		select {
		case <-sb.Gone():
		case <-b.left:
			return
		}
		m.Log.Info("a sandbox has ended", "sandbox_id", r.Spec.ID)
		const longest = 30 * time.Second
		for wait := 50 * time.Millisecond; ; wait = min(2*wait, longest) {
			err := m.deregister(context.Background(), r.Spec.ID, "it ended")
			if err == nil {
				return
			}
			m.Log.Warn("what a sandbox that ended has left cannot be cleaned up yet", "sandbox_id", r.Spec.ID, "error", err)
			select {
			case <-time.After(wait):
			case <-b.left:
				return
			}
		}
	})
}

// begin marks operations as running; a second one on a key is ABORTED.
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

func (m *Manager) find(id string) (*box, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.boxes[id]
	if !ok || b.closing {
		return nil, fault.New(fault.NotFound, "sandbox %q is not registered", id)
	}
	return b, nil
}

func (m *Manager) volume(id, source string) (*box, Volume, volumeRecord, error) {
	b, err := m.find(id)
	if err != nil {
		return nil, Volume{}, volumeRecord{}, err
	}
	m.mu.Lock()
	r, ok := b.record.Volumes[source]
	m.mu.Unlock()
	if !ok || r.State != published {
		return nil, Volume{}, r, fault.New(fault.NotFound, "volume %s is not published in sandbox %s", source, id)
	}
	v, err := r.volume()
	return b, v, r, err
}

// keep changes a volume's record, on disk first.
func (m *Manager) keep(b *box, source string, r *volumeRecord) error {
	m.mu.Lock()
	if m.boxes[b.record.Spec.ID] != b {
		m.mu.Unlock()
		return fault.New(fault.State, "sandbox %s was deregistered, or this server is stopping", b.record.Spec.ID)
	}
	next := b.record
	next.Volumes = maps.Clone(b.record.Volumes)
	m.mu.Unlock()
	if r == nil {
		delete(next.Volumes, source)
	} else {
		next.Volumes[source] = *r
	}
	// Records of one sandbox are written one at a time: keep runs under the key
	// of the sandbox's record.
	if err := m.store.put(next); err != nil {
		return err
	}
	m.mu.Lock()
	b.record = next
	m.mu.Unlock()
	return nil
}

// Register makes a sandbox known.
func (m *Manager) Register(ctx context.Context, spec Spec) error {
	if spec.ID == "" || len(spec.ID) > 128 || strings.ContainsAny(spec.ID, "/\x00\n") {
		return fault.New(fault.Invalid, "sandbox_id %q: give one of 1 to 128 bytes, without slashes", spec.ID)
	}
	end, err := m.begin("RegisterSandbox", "sandbox "+spec.ID)
	if err != nil {
		return err
	}
	defer end()
	m.mu.Lock()
	b, ok := m.boxes[spec.ID]
	m.mu.Unlock()
	if ok {
		if !reflect.DeepEqual(b.record.Spec, spec) {
			return fault.New(fault.Exists, "sandbox %s is registered in another way (%+v); deregister it first", spec.ID, b.record.Spec)
		}
		return nil
	}
	r := sandboxRecord{Spec: spec, BootID: m.boot, Volumes: map[string]volumeRecord{}}
	if spec.PID != 0 {
		if r.Started = linux.ProcessStart(spec.PID); r.Started == "" {
			return fault.New(fault.State, "process %d of the sandbox does not exist", spec.PID)
		}
	}
	if err := m.store.put(r); err != nil {
		return err
	}
	failpoint.Hit("register.recorded")
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	sb, err := m.Backend.Open(ctx, spec)
	if err != nil {
		return errors.Join(fmt.Errorf("sandbox %s: %w", spec.ID, err), m.Backend.Forget(spec), m.store.remove(spec.ID))
	}
	m.take(sb, r)
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_SANDBOX_REGISTERED, SandboxId: spec.ID})
	return nil
}

// Deregister takes a sandbox's volumes away from it and forgets it.
func (m *Manager) Deregister(ctx context.Context, id string) error {
	return m.deregister(ctx, id, "it was deregistered")
}

func (m *Manager) deregister(ctx context.Context, id, why string) error {
	end, err := m.begin("DeregisterSandbox", "sandbox "+id)
	if err != nil {
		return err
	}
	defer end()
	m.mu.Lock()
	b, ok := m.boxes[id]
	if ok {
		for key, what := range m.busy {
			if strings.HasPrefix(key, "volume of "+id+" ") {
				m.mu.Unlock()
				return fault.New(fault.Busy, "sandbox %s: %s is running; try again", id, what)
			}
		}
		b.closing = true
	}
	m.mu.Unlock()
	if !ok {
		return nil
	}
	var errs []error
	m.mu.Lock()
	volumes := maps.Clone(b.record.Volumes)
	m.mu.Unlock()
	for source, r := range volumes {
		v, err := r.volume()
		if err == nil {
			vctx, cancel := context.WithTimeout(ctx, m.Timeout)
			err = b.sandbox.Unpublish(vctx, v)
			cancel()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", source, err))
			continue
		}
		if err := m.write(b, source, nil); err != nil {
			errs = append(errs, err)
		}
		failpoint.Hit("deregister.unpublished")
	}
	if err := errors.Join(errs...); err != nil {
		m.mu.Lock()
		b.closing = false
		m.mu.Unlock()
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	if err := b.sandbox.Close(); err != nil {
		m.mu.Lock()
		b.closing = false
		m.mu.Unlock()
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	failpoint.Hit("deregister.closed")
	if err := m.store.remove(id); err != nil {
		return err
	}
	m.mu.Lock()
	if m.boxes[id] == b {
		delete(m.boxes, id)
		close(b.left)
	}
	m.mu.Unlock()
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_SANDBOX_GONE, SandboxId: id, Message: why})
	return nil
}

// claim refuses a device that another sandbox has: one device is never mounted
// read-write in two at once (C19).
func (m *Manager) claim(id string, v Volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for other, b := range m.boxes {
		for source, r := range b.record.Volumes {
			switch {
			case other == id && source == v.Device.Path:
			case r.Device.Same(v.Device) && (!r.ReadOnly || !v.ReadOnly):
				return fault.New(fault.State, "device %s is in use by sandbox %s (as %s): a file system cannot be mounted in two sandboxes at once, unless both only read", v.Device.Path, other, source)
			case other == id && r.Target == v.Target:
				return fault.New(fault.State, "sandbox %s has device %s at %s; unpublish it first", id, source, v.Target)
			}
		}
	}
	return nil
}
