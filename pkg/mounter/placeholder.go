package mounter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// placeholderSource is what the mount table shows for a placeholder.
const placeholderSource = "crust-deferred"

// placeholderAttrs of the mount.
const placeholderAttrs = linux.MountAttrRdonly | linux.MountAttrNosuid | linux.MountAttrNodev | linux.MountAttrNoexec

// AttachPlaceholder mounts a directory at the target that nobody can use: empty,
// read-only, mode 000, and unbindable. It stands where a volume would be that
// somebody else mounts elsewhere, so that a container runtime that knows nothing
// of it gives a container neither the volume nor the node's own disk. One that
// is there already is taken.
//
// The mount namespace that this runs in is the one in which the target cannot
// be bound: mount propagation does not carry that to others.
func AttachPlaceholder(t *Target) error {
	s, err := t.Glance()
	if err != nil {
		return err
	}
	there, err := s.Placeholder()
	if there && err == nil {
		// It may have been left before it was made unbindable.
		err = linux.MakeUnbindable(s.file)
	}
	s.Close()
	if there || err != nil {
		return err
	}
	ctx, err := linux.Fsopen("tmpfs")
	if err != nil {
		return err
	}
	defer ctx.Close()
	for _, o := range [][2]string{{"source", placeholderSource}, {"mode", "000"}, {"size", "4096"}, {"nr_inodes", "1"}} {
		if err := linux.FsconfigString(ctx, o[0], o[1]); err != nil {
			return fmt.Errorf("placeholder: %s: %w", o[0], err)
		}
	}
	// The whole file system, not this mount of it alone: crun takes a mount's own
	// flag off, and the container's root could open the directory.
	if err := linux.FsconfigFlag(ctx, "ro"); err != nil {
		return fmt.Errorf("placeholder: %w", err)
	}
	if err := linux.FsconfigCreate(ctx); err != nil {
		return fmt.Errorf("placeholder: %w", err)
	}
	mount, err := linux.Fsmount(ctx, placeholderAttrs)
	if err != nil {
		return err
	}
	d := &Detached{mount: mount, isDir: true, what: "placeholder"}
	defer d.Close()
	if err := d.Attach(t); err != nil {
		return err
	}
	err = failpoint.Err("placeholder.attached")
	if err == nil {
		err = linux.MakeUnbindable(d.mount)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("placeholder at %s: %w", t.Path, err), linux.DetachFile(d.mount))
	}
	return nil
}

// Placeholder tells whether what is mounted at the target is a placeholder.
func (s *State) Placeholder() (bool, error) {
	if s.Occupant != MountPoint {
		return false, nil
	}
	m, err := s.Mount()
	return err == nil && m.Placeholder(), err
}

// Placeholder tells whether the mount is one.
func (m Mount) Placeholder() bool { return m.Type == "tmpfs" && m.Source == placeholderSource }

// AttachOver makes the mount visible on top of a placeholder, or in an empty
// directory, at the target; on top of nothing else.
func (d *Detached) AttachOver(t *Target) error {
	s, err := t.Glance()
	if err != nil {
		return err
	}
	defer s.Close()
	placeholder, err := s.Placeholder()
	if err != nil {
		return err
	}
	if !placeholder {
		return d.Attach(t)
	}
	if err := linux.MoveMount(d.mount, s.file); err != nil {
		return fmt.Errorf("%s at %s: %w", d.what, t.Path, err)
	}
	return nil
}

// Namespace is a mount namespace.
type Namespace struct{ file *os.File }

// OpenNamespace opens the mount namespace that a file stands for:
// /proc/PID/ns/mnt, or a file that one is bound to.
func OpenNamespace(path string) (*Namespace, error) {
	f, err := linux.Open(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	n := &Namespace{f}
	if err := n.Do(func() error { return nil }); err != nil {
		return nil, errors.Join(fault.New(fault.State, "%s cannot be entered as a mount namespace: %w", path, err), f.Close())
	}
	return n, nil
}

// Do runs f on a thread in the namespace.
func (n *Namespace) Do(f func() error) error {
	if n == nil {
		return f() // the one that this process is in
	}
	return linux.InMountNamespace(n.file, f)
}

// Path is a path of the namespace for other processes, as long as this one has
// it open: what it is bound to is not to be seen in other mount namespaces.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd()) }

// Close releases the descriptor.
func (n *Namespace) Close() error { return n.file.Close() }

// IsPlaceholder tells whether a path lies at or below a placeholder, as far as
// it can be told: what cannot be reached is not one.
func IsPlaceholder(path string) (bool, error) {
	for {
		f, err := linux.Openat2(nil, path, linux.OPath, 0)
		if errors.Is(err, linux.ENOENT) || errors.Is(err, linux.EACCES) {
			// Below a placeholder there is nothing.
			parent := filepath.Dir(path)
			if parent == path {
				return false, nil
			}
			path = parent
			continue
		}
		if err != nil {
			return false, err
		}
		defer f.Close()
		st, err := linux.StatxFile(f)
		if err != nil || !st.MountRoot {
			return false, err
		}
		return (&State{Occupant: MountPoint, stat: st, file: f}).Placeholder()
	}
}
