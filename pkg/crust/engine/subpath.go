package engine

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// beneath opens a relative path inside a volume. It follows symbolic links that stay inside. It
// refuses whatever leads out, including absolute links and other file systems.
func beneath(root *os.File, sub string) (*os.File, error) {
	f, err := linux.Openat2(root, sub, linux.OPath, linux.ResolveBeneath|linux.ResolveNoMagic|linux.ResolveNoXdev)
	switch {
	case errors.Is(err, linux.EXDEV), errors.Is(err, linux.ELOOP):
		return nil, fault.New(fault.Invalid, "subPath %q leads out of the volume (by \"..\", a symbolic link or a mount); it was refused",
			sub)
	case errors.Is(err, linux.ENOENT), errors.Is(err, linux.ENOTDIR):
		return nil, fault.New(fault.State, "subPath %q: %w", sub, errMissing)
	}
	return f, err
}

var errMissing = errors.New("it does not exist in the volume")

// Within calls f with a directory or file of a mounted volume: see beneath. An empty sub is the volume's root.
func Within(s *mounter.State, sub string, f func(*os.File) error) error {
	root, err := s.Dir()
	if err != nil {
		return err
	}
	defer root.Close()
	if sub == "" {
		return f(root)
	}
	found, err := beneath(root, sub)
	if err != nil {
		return err
	}
	defer found.Close()
	return f(found)
}

// SubPath is Within for what a container mounts. It first makes missing directories, as a kubelet does: owned by root, with the
// permissions and the set-group-ID bit of the volume's root.
func SubPath(s *mounter.State, sub string, f func(*os.File) error) error {
	err := Within(s, sub, f)
	if !errors.Is(err, errMissing) {
		return err
	}
	root, err := s.Dir()
	if err != nil {
		return err
	}
	defer root.Close()
	if err := makeDirectories(root, sub); err != nil {
		return err
	}
	return Within(s, sub, f)
}

// makeDirectories makes what is missing of a path inside a volume. A pod can change the volume meanwhile. So each directory is made inside
// an open one, and after the first new one no link is followed.
func makeDirectories(root *os.File, sub string) error {
	st, err := linux.StatxFile(root)
	if err != nil {
		return err
	}
	mode := uint32(st.Mode) & 0o2777
	parent := root
	enter := func(next *os.File) {
		if parent != root {
			parent.Close()
		}
		parent = next
	}
	defer enter(root)
	failed := func(err error) error {
		return fault.New(fault.State, "subPath %q does not exist in the volume, and could not be made: %w", sub, err)
	}
	names := strings.Split(filepath.Clean(sub), "/")
	there := 0
	for ; there < len(names); there++ {
		next, err := beneath(root, filepath.Join(names[:there+1]...))
		if errors.Is(err, errMissing) {
			break
		}
		if err != nil {
			return failed(err)
		}
		enter(next)
	}
	for _, name := range names[there:] {
		next, err := makeDirectory(parent, name, mode)
		if err != nil {
			return failed(err)
		}
		enter(next)
	}
	return nil
}

// setMode sets the mode of a directory that was just made. A pod may have replaced it meanwhile: one that is not empty, or has another
// owner or mode, is refused.
func setMode(f *os.File, mode uint32) error {
	const made, checked = 0o700, 0o5777 // the set-group-ID bit may be inherited
	st, err := linux.StatxFile(f)
	if err != nil {
		return err
	}
	empty, err := linux.DirEmpty(f)
	if err != nil {
		return err
	}
	if !empty || uint32(st.Mode)&checked != made || st.UID != uint32(os.Geteuid()) {
		return errors.New("another directory was put in its place")
	}
	return linux.Fchmod(f, mode)
}

// makeDirectory makes a directory of this mode, also where a umask says less, or opens one that another container has just made.
func makeDirectory(parent *os.File, name string, mode uint32) (*os.File, error) {
	made := linux.Mkdirat(parent, name, 0o700)
	if made != nil && !errors.Is(made, linux.EEXIST) {
		return nil, made
	}
	f, err := linux.Openat2(parent, name, os.O_RDONLY|linux.ODirectory, linux.ResolveBeneath|linux.ResolveNoSymlinks|linux.ResolveNoXdev)
	if err != nil {
		return nil, err
	}
	if made == nil {
		err = setMode(f, mode)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
