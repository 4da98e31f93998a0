package namespace

import (
	"context"
	"os"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// mounted runs f on the mounted volume.
func (s *mountNamespace) mounted(v sandbox.Volume, f func(*mounter.State) error) error {
	return s.inside(v.Target, func(t *mounter.Target) error {
		st, there, err := ours(t, v)
		if err != nil {
			return err
		}
		defer st.Close()
		if !there {
			return fault.New(fault.State, "the volume is not mounted at %s in the sandbox any more", v.Target)
		}
		return f(st)
	})
}

func (s *mountNamespace) Stats(_ context.Context, v sandbox.Volume) (u mounter.Usage, ailment string, err error) {
	err = s.mounted(v, func(st *mounter.State) error {
		var err error
		var messages []string
		for _, a := range st.Ailments(v.Device) {
			messages = append(messages, a.Message)
		}
		ailment = strings.Join(messages, "; ")
		u, err = st.Usage()
		return err
	})
	return u, ailment, err
}

func (s *mountNamespace) Expand(_ context.Context, v sandbox.Volume, _ int64) error {
	return s.mounted(v, func(st *mounter.State) error { return engine.Grow(st, v.Type, v.Device) })
}

func (s *mountNamespace) Resolve(_ context.Context, v sandbox.Volume, sub string) (path string, err error) {
	err = s.mounted(v, func(st *mounter.State) error {
		if sub == "" {
			path = v.Target
			return nil
		}
		return engine.SubPath(st, sub, func(f *os.File) (err error) {
			path, err = mounter.BindAt(f, s.binds(v), engine.Name(sub))
			return err
		})
	})
	return path, err
}

// PrepareSlot makes the slot in the namespace.
func (s *mountNamespace) PrepareSlot(_ context.Context, slot string) (path string, err error) {
	s.slots.Lock()
	defer s.slots.Unlock()
	err = s.ns.Do(func() error {
		path, err = s.slots.Prepare(slot)
		return err
	})
	return path, err
}

// Bind mounts the volume on the slot.
func (s *mountNamespace) Bind(_ context.Context, slot string, v sandbox.Volume, sub string, readOnly bool) error {
	s.slots.Lock()
	defer s.slots.Unlock()
	return s.mounted(v, func(st *mounter.State) error {
		return engine.Within(st, sub, func(f *os.File) error { return s.slots.Bind(slot, f, readOnly) })
	})
}

// Unbind unmounts what is on the slot.
func (s *mountNamespace) Unbind(_ context.Context, slot string) error {
	s.slots.Lock()
	defer s.slots.Unlock()
	return s.ns.Do(func() error { return s.slots.Unbind(slot) })
}
