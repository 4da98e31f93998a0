package sandbox

import (
	"context"
	"fmt"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// inSlot calls f for a slot of a sandbox, while no other call for the slot runs.
func (m *Manager) inSlot(ctx context.Context, what, id, slot string, f func(context.Context, Binder) error) error {
	if err := crust.CheckSlot(slot); err != nil {
		return err
	}
	if _, err := m.find(id); err != nil {
		return err
	}
	end, err := m.begin(what, key(id, "slot "+slot))
	if err != nil {
		return err
	}
	defer end()
	b, err := m.find(id)
	if err != nil {
		return err // it was deregistered meanwhile
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	switch sb := b.sandbox().(type) {
	case Binder:
		err = f(ctx, sb)
	case interface{ failed() error }:
		err = sb.failed()
	default:
		err = fault.New(fault.State, "sandboxes of kind %q have no slots", m.Backend.Kind())
	}
	if err != nil {
		return fmt.Errorf("slot %s in sandbox %s: %w", slot, id, err)
	}
	return nil
}

// PrepareSlot returns the path of a slot inside a sandbox, and makes the slot unless there is one.
func (m *Manager) PrepareSlot(ctx context.Context, id, slot string) (path string, err error) {
	err = m.inSlot(ctx, "ResolveMount", id, slot, func(ctx context.Context, b Binder) error {
		path, err = b.PrepareSlot(ctx, slot)
		return err
	})
	return path, err
}

// Bind shows a directory of a published volume in a slot.
func (m *Manager) Bind(ctx context.Context, id, slot, source, sub string, readOnly bool) error {
	return m.inSlot(ctx, "BindVolume", id, slot, func(ctx context.Context, b Binder) error {
		if _, _, _, err := m.volume(id, source); err != nil {
			return err // it may be the key of something else
		}
		end, err := m.begin("BindVolume", key(id, source))
		if err != nil {
			return err
		}
		defer end()
		_, v, r, err := m.volume(id, source)
		if err != nil {
			return err
		}
		if r.State == pending {
			return fault.New(fault.Unavailable, "volume %s is mounted when a container of the sandbox starts", source)
		}
		return b.Bind(ctx, slot, v, sub, readOnly)
	})
}

// Unbind empties a slot.
func (m *Manager) Unbind(ctx context.Context, id, slot string) error {
	return m.inSlot(ctx, "UnbindVolume", id, slot, func(ctx context.Context, b Binder) error { return b.Unbind(ctx, slot) })
}
