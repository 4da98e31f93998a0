package mounter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// placeholderSource is the source of a placeholder in the mount table.
const placeholderSource = "crust-deferred"

// placeholderAttrs are the mount attributes of a placeholder.
const placeholderAttrs = linux.MountAttrRdonly | linux.MountAttrNosuid | linux.MountAttrNodev | linux.MountAttrNoexec

// AttachPlaceholder mounts an unusable directory at the target: empty, read-only, mode 000 and
// unbindable. It takes the place of a volume that somebody else mounts elsewhere. A container
// runtime that does not know about this gives the container neither the volume nor the node's
// own disk. An existing placeholder is kept.
//
// The target is unbindable only in the mount namespace that this runs in: mount propagation
// does not copy that property.
//
// With directories as crust.ParseSubPaths returns them, it contains them, just as unusable, and is not unbindable: a kubelet binds
// them for subPaths.
func AttachPlaceholder(t *Target, directories ...string) error {
	s, err := t.Glance()
	if err != nil {
		return err
	}
	there, err := s.Placeholder()
	if there && err == nil {
		err = finishPlaceholder(s)
	}
	s.Close()
	if there || err != nil {
		return err
	}
	context, err := placeholderContext()
	if err != nil {
		return err
	}
	d, err := emptyTree(placeholderSource, 0, context, directories)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Attach(t); err != nil {
		return err
	}
	err = failpoint.Err("placeholder.attached")
	if err == nil && len(directories) == 0 {
		err = linux.MakeUnbindable(d.mount)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("placeholder at %s: %w", t.Path, err), linux.DetachFile(d.mount))
	}
	return nil
}

// finishPlaceholder makes a placeholder without directories unbindable. A crash may have left it before that.
func finishPlaceholder(s *State) error {
	fs, err := linux.Fstatfs(s.file)
	if err != nil || fs.Inodes > 1 { // see emptyTree
		return err
	}
	return linux.MakeUnbindable(s.file)
}

// OpenShelf makes a detached file system that nobody can write to, like a placeholder's. It has one empty directory, on which
// something can be mounted. Name is its source in the mount table.
func OpenShelf(name, directory string) (*Detached, error) {
	return emptyTree(name, 0o755, "", []string{".", directory})
}

// emptyTree makes a detached file system that nobody can write to. It has these directories, of which the root, ".", is the first, or only
// the root if there are none. Only in that case it has room for a single inode. All directories have this mode, and this SELinux label if
// it is not empty.
func emptyTree(source string, mode uint32, context string, directories []string) (*Detached, error) {
	first := mode
	if len(directories) > 0 {
		first = 0o700 // its owner makes directories in it also without CAP_DAC_OVERRIDE
	}
	ctx, err := tmpfs([2]string{"source", source}, [2]string{"mode", strconv.FormatUint(uint64(first), 8)},
		[2]string{"nr_inodes", strconv.Itoa(1 + len(directories))}, [2]string{"context", context})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	defer ctx.Close()
	if err := linux.FsconfigCreate(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	mount, err := linux.Fsmount(ctx, 0)
	if err != nil {
		return nil, err
	}
	if len(directories) > 0 {
		err = fill(mount, directories, mode)
	}
	// Make the superblock read-only, not only this mount. crun clears the mount's own flag, and
	// then root in the container could open the directory.
	if err == nil {
		err = linux.FsconfigFlag(ctx, "ro")
	}
	if err == nil {
		err = linux.FsconfigReconfigure(ctx)
	}
	if err == nil {
		err = linux.MountSetattr(mount, linux.MountAttr{Set: placeholderAttrs}, false)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", source, err), mount.Close())
	}
	return &Detached{mount: mount, isDir: true, what: source}, nil
}

// fill makes the directories, and gives them and the root their mode.
func fill(root *os.File, directories []string, mode uint32) error {
	if directories[0] != "." {
		return fault.New(fault.Invalid, "directories %q: the first must be the root, \".\"", directories)
	}
	for _, dir := range directories[1:] {
		if err := linux.Mkdirat(root, dir, 0o700); err != nil {
			return err
		}
	}
	// Those inside others come first: then the others can still be passed.
	for _, dir := range slices.Backward(directories) {
		f, err := linux.Openat2(root, dir, os.O_RDONLY|linux.ODirectory, linux.ResolveBeneath|linux.ResolveNoSymlinks)
		if err != nil {
			return err
		}
		if err := errors.Join(linux.Fchmod(f, mode), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// tmpfs begins a tmpfs with these options, without those that are empty.
func tmpfs(options ...[2]string) (*os.File, error) {
	ctx, err := linux.Fsopen("tmpfs")
	if err != nil {
		return nil, err
	}
	for _, o := range append(options, [2]string{"size", "4096"}) {
		if o[1] == "" {
			continue
		}
		if err := linux.FsconfigString(ctx, o[0], o[1]); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", o[0], err), ctx.Close())
		}
	}
	return ctx, nil
}

// placeholderContext returns the SELinux label that a tmpfs gets on this node, empty without SELinux. A placeholder is mounted
// with it as context=. Its entry in the mount table has no `seclabel` then, so that a kubelet does not ask the container
// runtime to relabel it. Relabelling fails on a read-only file system, and the pod would not start.
func placeholderContext() (string, error) {
	if SELinux().Answer == No {
		return "", nil
	}
	probe, err := emptyTree(placeholderSource, 0o700, "", nil) // its mode lets a process without CAP_DAC_OVERRIDE open it
	if err != nil {
		return "", err
	}
	label, err := probe.Label()
	if err != nil {
		err = fmt.Errorf("placeholder: its SELinux label: %w", err)
	}
	return label, errors.Join(err, probe.Close())
}

// Placeholder reports whether what is mounted at the target is a placeholder.
func (s *State) Placeholder() (bool, error) {
	if s.Occupant != MountPoint {
		return false, nil
	}
	m, err := s.Mount()
	return err == nil && m.Placeholder(), err
}

// Placeholder reports whether the mount is a placeholder.
func (m Mount) Placeholder() bool { return m.Type == "tmpfs" && m.Source == placeholderSource }

// AttachOver makes the mount visible at the target, on top of a placeholder or in an empty
// directory only.
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

// Namespace is a mount namespace. A nil one is that of this process.
type Namespace struct{ file *os.File }

// OpenNamespace opens the mount namespace given by a file: /proc/PID/ns/mnt, or a bind mount of
// one.
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
		return f()
	}
	return linux.InMountNamespace(n.file, f)
}

// Path returns a path by which other processes can open the namespace while this one has it
// open. A bind mount of it would not be visible in other mount namespaces.
func (n *Namespace) Path() string {
	if n == nil {
		return fmt.Sprintf("/proc/%d/ns/mnt", os.Getpid())
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Close releases the descriptor. A nil Namespace has none.
func (n *Namespace) Close() error {
	if n == nil {
		return nil
	}
	return n.file.Close()
}

// IsPlaceholder reports whether a path is at or below a placeholder. It returns false for a
// path that it cannot reach.
func IsPlaceholder(path string) (bool, error) {
	for {
		f, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
		if errors.Is(err, linux.ENOENT) || errors.Is(err, linux.EACCES) || errors.Is(err, linux.ENOTDIR) || errors.Is(err, linux.ELOOP) {
			// The path may be below a placeholder, where it does not exist.
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
		fs, err := linux.Fstatfs(f)
		if err != nil || fs.Type != linux.Tmpfs {
			return false, err
		}
		st, err := linux.StatxFile(f)
		if err != nil {
			return false, err
		}
		return (&State{Occupant: MountPoint, stat: st, file: f}).Placeholder()
	}
}
