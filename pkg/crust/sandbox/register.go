package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Register adds a sandbox.
func (m *Manager) Register(ctx context.Context, spec Spec) error {
	if spec.ID == "" || len(spec.ID) > 128 || strings.ContainsAny(spec.ID, "/\x00\n") {
		return fault.New(fault.Invalid, "sandbox_id %q: give one of 1 to 128 bytes, without slashes", spec.ID)
	}
	if err := m.unusable(spec.ID); err != nil {
		return err
	}
	end, err := m.begin("RegisterSandbox", "sandbox "+spec.ID)
	if err != nil {
		return err
	}
	defer end()
	m.mu.Lock()
	b, ok := m.sandboxes[spec.ID]
	var have Spec
	closing := false
	if ok {
		have, closing = b.record.Spec, b.closing
	}
	m.mu.Unlock()
	if closing {
		return fault.New(fault.Busy, "sandbox %s is being deregistered; repeat DeregisterSandbox, then try again", spec.ID)
	}
	if ok {
		if have != spec {
			return fault.New(fault.Exists, "sandbox %s is registered in another way (%+v); deregister it first", spec.ID, have)
		}
		return nil
	}
	nctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	pid := spec.PID
	if pid == 0 {
		if pid, err = m.Backend.Process(nctx, spec); err != nil {
			return fmt.Errorf("sandbox %s: %w", spec.ID, err)
		}
	}
	b = newRegistered(sandboxRecord{Kind: m.Backend.Kind(), Spec: spec, BootID: m.boot, Volumes: map[string]volumeRecord{}})
	var pidfd *os.File
	if pid != 0 {
		if b.record.Process, pidfd, err = identify(pid); err != nil {
			return fmt.Errorf("sandbox %s: %w", spec.ID, err)
		}
	}
	err = m.store.add(b.record)
	if err == nil {
		var sb Sandbox
		if err = failpoint.Err("register.recorded"); err == nil {
			sb, err = m.open(nctx, b)
		}
		if err == nil {
			b.set(sb)
		} else {
			err = errors.Join(fmt.Errorf("sandbox %s: %w", spec.ID, err), m.forget(spec))
		}
	}
	if err != nil {
		if pidfd != nil {
			pidfd.Close()
		}
		return err
	}
	m.take(b, pidfd)
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_SANDBOX_REGISTERED, SandboxId: spec.ID})
	return nil
}

// registered answers a request that does not say how to reach the sandbox. The sandbox's runtime says it, in a registration of its own.
// Whoever knows the sandbox by its id, as an orchestrator does, repeats the request until that has come.
func (m *Manager) registered(id string) error {
	if _, err := m.find(id); !fault.Is(err, fault.NotFound) {
		return err
	}
	return fault.New(fault.Unavailable, "sandbox %q is not registered yet: its runtime has to register it, and to say how it is reached", id)
}

// Deregister unpublishes a sandbox's volumes and removes it.
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
	b, ok := m.sandboxes[id]
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
		return m.unusable(id)
	}
	var errs []error
	m.mu.Lock()
	volumes := maps.Clone(b.record.Volumes)
	m.mu.Unlock()
	for source, r := range volumes {
		v, err := r.volume()
		if err == nil {
			vctx, cancel := context.WithTimeout(ctx, m.Timeout)
			err = b.sandbox().Unpublish(vctx, v)
			cancel()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", source, err))
			continue
		}
		if err := m.keep(b, source, nil); err != nil {
			errs = append(errs, err)
		}
		if err := failpoint.Err("deregister.unpublished"); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		m.mu.Lock()
		b.closing = false
		m.mu.Unlock()
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	sb := b.sandbox() // the one that is closed; it may be reached again meanwhile
	if err := sb.Close(); err != nil {
		if _, untouched := sb.(unreachable); untouched {
			m.mu.Lock()
			b.closing = false
			m.mu.Unlock()
		}
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	err = failpoint.Err("deregister.closed")
	if err == nil {
		err = m.store.remove(id)
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	if m.sandboxes[id] == b {
		delete(m.sandboxes, id)
		close(b.left)
	}
	m.mu.Unlock()
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_SANDBOX_GONE, SandboxId: id, Message: why})
	return nil
}
