// Package namespace is the backend for private mount namespaces on the host's kernel. A volume is
// mounted at its host target path inside one of them only. Containers started in it see the volume;
// the host's mount table does not. This protects the host's mount table and paths, but not the
// host's kernel, which still parses the file system.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Backend keeps mount namespaces below a directory:
//
//	ns/<hash of the id>           the namespace is bound to it
//	binds/<hash>/<hash of path>   sub-paths are bound here, inside the namespace
//	shown/<hash>/<slot>           see engine.Slots; no path of it must look like one in crust.SlotsDir
//	scratch/<hash>                for mount(2), see engine.Request
type Backend struct {
	dir        string
	kubeletDir string
}

// New keeps the backend's state in dir. kubeletDir is the directory above every target. Both are required.
func New(dir, kubeletDir string) (*Backend, error) {
	if dir == "" || kubeletDir == "" {
		return nil, fault.New(fault.Invalid, "namespace.New needs a directory for its state and the kubelet's directory")
	}
	b := &Backend{dir: dir, kubeletDir: kubeletDir}
	pins := filepath.Join(dir, "ns")
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return nil, err
	}
	// Bind namespaces on a private mount only: a copy of the binding that propagates into the
	// namespace would keep it for ever.
	return b, linux.PrivateMount(pins)
}

// Close unmounts the directory if no namespace is bound there.
func (b *Backend) Close() error {
	pins := filepath.Join(b.dir, "ns")
	left, err := os.ReadDir(pins)
	if err != nil || len(left) > 0 {
		return err
	}
	return linux.Unmount(pins)
}

// Forget unpins the namespace of an ended sandbox.
func (b *Backend) Forget(spec sandbox.Spec) error {
	return b.sandbox(spec).unpin()
}

func (b *Backend) sandbox(spec sandbox.Spec) *mountNamespace {
	name := engine.Name(spec.ID)
	return &mountNamespace{b: b, spec: spec, pin: filepath.Join(b.dir, "ns", name),
		slots: engine.Slots{Dir: filepath.Join(b.dir, "shown", name)}}
}

// Kind is "namespace".
func (b *Backend) Kind() string { return "namespace" }

// Capabilities are the host kernel's.
func (b *Backend) Capabilities() []crust.Capability {
	list := append(sandbox.BasicCapabilities(mounter.SELinux().Answer == mounter.Yes), crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL)
	here := func(name string) bool { return fstype.Of(name).Grow != nil && b.Mounts(name) && !b.Grows(name) }
	if slices.ContainsFunc(fstype.Formats(), here) {
		// This capability covers all file systems that some kernel grows, or none. Newer agents ask by
		// file system: see Grows.
		kept := list[:0]
		for _, c := range list {
			if c != crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE {
				kept = append(kept, c)
			}
		}
		list = kept
	}
	return list
}

// FileSystems returns those that the kernel can mount.
func (b *Backend) FileSystems(context.Context) ([]string, error) { return mounter.Mountable() }

// Mounts tells whether the kernel has a file system. If unknown, it returns true; the mount
// decides.
func (b *Backend) Mounts(fstype string) bool {
	list, err := mounter.Mountable()
	return err != nil || slices.Contains(list, fstype)
}

// Grows reports whether this process can grow the file system with this kernel.
func (b *Backend) Grows(fstype string) bool { return mounter.Grows(fstype) }

// Process returns 0: a namespace registered without a process lives until it is deregistered.
func (b *Backend) Process(context.Context, sandbox.Spec) (int, error) { return 0, nil }

// Open creates the namespace, or finds the one of an earlier process.
func (b *Backend) Open(_ context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	var how registration
	if err := o.Reach(&how); err != nil {
		return nil, err
	}
	s := b.sandbox(o.Spec)
	fresh, err := pinned(s.pin, len(o.Volumes) > 0, linux.PinMountNamespace)
	if err != nil {
		return nil, fmt.Errorf("mount namespace: %w", err)
	}
	if fresh {
		if err := failpoint.Err("namespace.pinned"); err != nil {
			return nil, err
		}
	}
	if s.ns, err = mounter.OpenNamespace(s.pin); err != nil {
		return nil, err
	}
	if how.UserNamespace != "" {
		// Pin this one too: after a restart the path may belong to another process.
		bind := func(pin string) error { return linux.BindFile(how.UserNamespace, pin) }
		if _, err = pinned(s.userPin(), len(o.Volumes) > 0, bind); err == nil {
			s.userns, err = linux.Open(s.userPin(), os.O_RDONLY)
		}
		if err != nil {
			return nil, errors.Join(fault.New(fault.State, "the sandbox's user namespace: %w", err), s.ns.Close())
		}
	}
	return s, nil
}

// pinned binds a namespace to the file unless one is bound there. With must, a missing one is an
// error: a new, empty namespace is no substitute.
func pinned(pin string, must bool, bind func(string) error) (fresh bool, err error) {
	f, err := os.OpenFile(pin, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return false, err
	}
	f.Close()
	st, err := linux.StatxPath(pin)
	switch {
	case err != nil || st.MountRoot:
		return false, err
	case must:
		return false, fault.New(fault.State,
			"what was bound to %s is not there any more (was the state directory unmounted, or this server "+
				"restarted in another mount namespace?)", pin)
	}
	return true, bind(pin)
}

type mountNamespace struct {
	b      *Backend
	spec   sandbox.Spec
	pin    string
	slots  engine.Slots
	ns     *mounter.Namespace
	userns *os.File
}

func (s *mountNamespace) userPin() string        { return s.pin + ".user" }
func (s *mountNamespace) MountNamespace() string { return s.ns.Path() }

// inside runs f in the namespace, with the volume's target there.
func (s *mountNamespace) inside(target string, f func(*mounter.Target) error) error {
	return s.ns.Do(func() error {
		root, err := mounter.OpenRoot(s.b.kubeletDir)
		if err != nil { // never NotFound, which is about the target
			return fault.New(fault.State, "the sandbox's mount namespace: %w", err)
		}
		defer root.Close()
		t, err := root.Target(target)
		if err != nil {
			return err
		}
		defer t.Close()
		return f(t)
	})
}

// ours tells whether the volume is mounted at the target.
func ours(t *mounter.Target, v sandbox.Volume) (*mounter.State, bool, error) {
	st, err := t.Glance()
	if err != nil {
		return nil, false, err
	}
	if st.Occupant == mounter.MountPoint {
		if m, err := st.Mount(); err == nil && fstype.Of(m.Type).Numberless && m.Source == v.Device.Path {
			return st, true, nil // it was mounted by this path, wherever that leads by now
		}
	}
	dev, ok, err := st.Device()
	return st, err == nil && ok && dev.Same(v.Device), err
}

func (s *mountNamespace) Publish(ctx context.Context, v sandbox.Volume) (sandbox.Place, error) {
	err := s.inside(v.Target, func(t *mounter.Target) error {
		st, there, err := ours(t, v)
		if err != nil {
			return err
		}
		st.Close()
		if there {
			return nil
		}
		// The kernel would give any caller a second read-write mount of the same file system.
		busy, err := mounter.Busy(v.Device.Path)
		if err != nil {
			return err
		}
		if busy && len(v.Readers) == 0 {
			return sandbox.Untouched(fault.New(fault.State, "%s is in use outside of this sandbox, so it was not mounted%s",
				v.Device.Path, mounter.HeldBy(v.Device).After("; ")))
		}
		m, err := engine.Open(ctx, engine.Request{
			Device: v.Device, Type: v.Type, Options: v.Options, ReadOnly: v.ReadOnly, Group: v.Group, Policy: v.Policy,
			UserNamespace: s.userns, Scratch: filepath.Join(s.b.dir, "scratch", engine.Name(s.spec.ID+v.Target)),
			NoPanic: true, // this is the host's kernel
			Step: func(name string) func(error) {
				_, end := tracing.Begin(ctx, name)
				return end
			},
		})
		if err != nil {
			return err
		}
		defer m.Close()
		if err := failpoint.Err("namespace.opened"); err != nil {
			return err
		}
		if err := m.AttachOver(t); err != nil {
			return err
		}
		return failpoint.Err("namespace.attached")
	})
	return sandbox.Place{Device: v.Device.Path, Path: v.Target}, err
}

func (s *mountNamespace) Unpublish(_ context.Context, v sandbox.Volume) error {
	s.slots.Lock()
	defer s.slots.Unlock()
	if err := s.ns.Do(func() error { return s.slots.EmptyAll(v.Device) }); err != nil {
		return err
	}
	if err := s.unbind(v); err != nil {
		return err
	}
	err := s.inside(v.Target, func(t *mounter.Target) error {
		const layers = 4
		for range layers {
			st, there, err := ours(t, v)
			if err != nil {
				return err
			}
			st.Close()
			if !there {
				return nil
			}
			if err := t.Unmount(); err != nil {
				return err
			}
		}
		return fault.New(fault.State, "more than %d mounts of the volume lie on %s", layers, v.Target)
	})
	if err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Invalid) {
		return err
	}
	if v.ReadOnly && err == nil {
		return nil // another sandbox may read it too
	}
	// Containers have copies of the mount. At an unreachable target nothing is mounted, or not any
	// more. The device decides.
	busy, berr := v.InUse()
	switch {
	case berr != nil:
		return errors.Join(err, berr)
	case busy:
		return errors.Join(err, fault.New(fault.State, "%s is still in use: a container of the sandbox has it, or somebody else%s",
			v.Device.Path, mounter.HeldBy(v.Device).After("; ")))
	}
	return nil
}

// binds is the directory inside the namespace for a volume's sub-paths.
func (s *mountNamespace) binds(v sandbox.Volume) string {
	return filepath.Join(s.b.dir, "binds", engine.Name(s.spec.ID), engine.Name(v.Target))
}

// unbind removes them.
func (s *mountNamespace) unbind(v sandbox.Volume) error {
	dir := s.binds(v)
	places, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	err = s.ns.Do(func() error {
		var errs []error
		for _, p := range places {
			if err := linux.Unmount(filepath.Join(dir, p.Name())); err != nil && !errors.Is(err, linux.EINVAL) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	return removePlaces(dir)
}

// removePlaces removes the binds' mount points, empty outside the namespace, and their directory.
func removePlaces(dir string) error {
	places, err := os.ReadDir(dir)
	errs := []error{ignoreNotExist(err)}
	for _, p := range places {
		errs = append(errs, os.Remove(filepath.Join(dir, p.Name())))
	}
	return errors.Join(append(errs, ignoreNotExist(os.Remove(dir)))...)
}

// Detach leaves the namespace for the next process.
func (s *mountNamespace) Detach() {
	s.ns.Close()
	if s.userns != nil {
		s.userns.Close()
	}
}

// Close unpins the namespace. Its mounts end with its last process.
func (s *mountNamespace) Close() error {
	s.Detach()
	return s.unpin()
}

func (s *mountNamespace) unpin() error {
	for _, pin := range []string{s.pin, s.userPin()} {
		if err := linux.Unmount(pin); err != nil && !errors.Is(err, linux.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := failpoint.Err("namespace.unpinned"); err != nil {
		return err
	}
	errs := []error{ignoreNotExist(os.Remove(s.pin)), ignoreNotExist(os.Remove(s.userPin()))}
	// The binds' mount points; they are mounted inside the namespace only.
	dir := filepath.Join(s.b.dir, "binds", engine.Name(s.spec.ID))
	volumes, err := os.ReadDir(dir)
	errs = append(errs, ignoreNotExist(err))
	for _, v := range volumes {
		errs = append(errs, removePlaces(filepath.Join(dir, v.Name())))
	}
	return errors.Join(append(errs, ignoreNotExist(os.Remove(dir)), s.slots.Remove())...)
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
