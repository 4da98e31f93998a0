package mounter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Root is the directory that contains all targets: the kubelet's. Paths are resolved beneath
// its descriptor and never through a symbolic link. So neither a planted link nor a directory
// swapped during a call can redirect them.
type Root struct {
	dir  *os.File
	path string // as given
	real string // path with its symbolic links resolved, once
}

// OpenRoot opens the directory. It resolves symbolic links in the path itself once, because the
// administrator made them. A missing directory is a fault.NotFound.
func OpenRoot(path string) (*Root, error) {
	if !filepath.IsAbs(path) {
		return nil, fault.New(fault.Invalid, "directory %q is no absolute path", path)
	}
	var dir *os.File
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		dir, err = linux.Openat2(linux.CWD, real, linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
	}
	if errors.Is(err, linux.ENOENT) {
		return nil, fault.New(fault.NotFound, "directory %s: %w", path, err)
	}
	if err != nil {
		return nil, err
	}
	return &Root{dir: dir, path: filepath.Clean(path), real: real}, nil
}

// Close releases the descriptor.
func (r *Root) Close() error { return r.dir.Close() }

// Path returns the path given to OpenRoot.
func (r *Root) Path() string { return r.path }

// Relative validates a path from a caller and returns it relative to the root.
func (r *Root) Relative(path string) (string, error) {
	const pathMax, nameMax = 4096, 255
	switch {
	case path == "":
		return "", fault.New(fault.Invalid, "the path is empty")
	case len(path) >= pathMax:
		return "", fault.New(fault.Invalid, "the path is %d bytes long; the system's limit is %d", len(path), pathMax-1)
	case strings.ContainsRune(path, 0):
		return "", fault.New(fault.Invalid, "the path contains a zero byte")
	case !filepath.IsAbs(path) || filepath.Clean(path) != path:
		return "", fault.New(fault.Invalid, "path %q is not an absolute path in its shortest form", path)
	}
	for _, root := range []string{r.path, r.real} {
		rel, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/")
		if !ok {
			continue
		}
		for _, name := range strings.Split(rel, "/") {
			if len(name) > nameMax {
				return "", fault.New(fault.Invalid, "path %q has a name longer than %d bytes", path, nameMax)
			}
		}
		return rel, nil
	}
	return "", fault.New(fault.Invalid, "path %q is not below %s, where all targets lie", path, r.path)
}

// Target is a name in a directory that is held open.
type Target struct {
	Path   string
	root   *Root
	rel    string
	parent *os.File
	name   string
}

// Target opens the parent directory of the path. It must exist, else the error is
// fault.NotFound.
func (r *Root) Target(path string) (*Target, error) {
	rel, err := r.Relative(path)
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(rel)
	parent, err := linux.Openat2(r.dir, dir, linux.OPath|linux.ODirectory,
		linux.ResolveBeneath|linux.ResolveNoSymlinks|linux.ResolveNoMagic)
	switch {
	case errors.Is(err, linux.ENOENT):
		return nil, fault.New(fault.NotFound, "the directory of %s does not exist", path)
	case errors.Is(err, linux.ELOOP), errors.Is(err, linux.ENOTDIR), errors.Is(err, linux.EXDEV):
		return nil, fault.New(fault.Invalid, "the path %s leads through a symbolic link or a file; it must consist of directories", path)
	case err != nil:
		return nil, fmt.Errorf("the directory of %s: %w", path, err)
	}
	return &Target{Path: path, root: r, rel: rel, parent: parent, name: filepath.Base(rel)}, nil
}

// Close releases the descriptor.
func (t *Target) Close() error { return t.parent.Close() }

// Occupant is the kind of what is at a target.
type Occupant int

// The kinds of Occupant.
const (
	Absent     Occupant = iota
	EmptyDir            // a directory without entries
	EmptyFile           // a regular file without content
	Data                // a directory or file that is not empty
	Symlink             // a symbolic link; never followed
	Other               // a device node, socket, pipe
	MountPoint          // the root of a mount: of a file system, or of a bound file
)

// State is what is at a target now. For a MountPoint, see Mount.
type State struct {
	Occupant Occupant
	stat     linux.Statx
	file     *os.File
	dead     error // the error of a file system that does not answer for its own root
}

// Close releases the descriptor.
func (s *State) Close() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// Look examines the target. The caller must close the State.
func (t *Target) Look() (*State, error) { return t.look(true) }

// Glance is like Look for callers that need only the kind. It does not examine a directory or
// file, and reports it as empty.
func (t *Target) Glance() (*State, error) { return t.look(false) }

// look reports a directory or file as empty if content is false.
func (t *Target) look(content bool) (*State, error) {
	f, err := linux.Openat(t.parent, t.name, linux.OPath|linux.ONofollow, 0)
	if errors.Is(err, linux.ENOENT) {
		return &State{Occupant: Absent}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Path, err)
	}
	s := &State{file: f}
	if err := t.classify(s, content); err != nil {
		s.Close()
		return nil, fmt.Errorf("%s: %w", t.Path, err)
	}
	return s, nil
}

func (t *Target) classify(s *State, content bool) error {
	var err error
	s.stat, err = linux.StatxFile(s.file)
	if errors.Is(err, linux.EIO) {
		return t.classifyDead(s, err)
	}
	if err != nil {
		return err
	}
	switch st := s.stat; {
	case st.MountRoot:
		s.Occupant = MountPoint
	case st.IsSymlink():
		s.Occupant = Symlink
	case st.IsDir():
		s.Occupant = EmptyDir
		if !content {
			break
		}
		if empty, err := linux.DirEmpty(s.file); err != nil {
			return err
		} else if !empty {
			s.Occupant = Data
		}
	case st.IsRegular():
		s.Occupant = Data
		if st.Size == 0 {
			s.Occupant = EmptyFile
		}
	default:
		s.Occupant = Other
	}
	return nil
}

// classifyDead handles a file system that does not answer for its own root, such as xfs after a
// shutdown. It can still be unmounted. The kernel knows the mount without asking the file
// system.
func (t *Target) classifyDead(s *State, dead error) error {
	id, err := classicMountID(s.file)
	if err != nil {
		return errors.Join(dead, err)
	}
	around, err := classicMountID(t.parent)
	if err != nil || id == around {
		return errors.Join(dead, err)
	}
	m, err := mountByID(s.file, id)
	if err != nil {
		return errors.Join(dead, err)
	}
	s.Occupant, s.dead = MountPoint, dead
	s.stat = linux.Statx{Mode: linux.Directory, MountRoot: true, DevMajor: m.Major, DevMinor: m.Minor}
	return nil
}

func (t *Target) refuse(s *State, want string) error {
	what := map[Occupant]string{
		EmptyDir: "is a directory", EmptyFile: "is a file", Data: "holds data and is no mount point",
		Symlink: "is a symbolic link", Other: "is neither a directory nor a file", MountPoint: "has something mounted on it",
	}[s.Occupant]
	return fault.New(fault.State, "%s %s; %s belongs there. It was left alone: look at it, and move or remove it by hand",
		t.Path, what, want)
}

// prepare creates the directory (or, for a block device, the file) at the target, or uses an
// existing empty one. It returns it open.
func (t *Target) prepare(directory bool) (*os.File, error) {
	want, wantName := EmptyFile, "an empty file"
	if directory {
		want, wantName = EmptyDir, "an empty directory"
	}
	s, err := t.Look()
	if err != nil {
		return nil, err
	}
	if s.Occupant == Absent {
		if err := t.create(directory); err != nil {
			return nil, fmt.Errorf("%s: %w", t.Path, err)
		}
		if err := failpoint.Err("target.created"); err != nil {
			return nil, err
		}
		if s, err = t.look(false); err != nil { // just created, so it is empty
			return nil, err
		}
	}
	if s.Occupant != want {
		s.Close()
		return nil, t.refuse(s, wantName)
	}
	return s.file, nil
}

func (t *Target) create(directory bool) error {
	if directory {
		return linux.Mkdirat(t.parent, t.name, 0o750)
	}
	f, err := linux.Openat(t.parent, t.name, os.O_CREATE|os.O_EXCL|os.O_WRONLY|linux.ONofollow, 0o640)
	if err != nil {
		return err
	}
	return f.Close()
}

// Unmount removes the topmost mount from the target, and what is mounted inside it: a tree of [OpenTree], or what a pod mounted there.
// After an error, some of that may be gone. It fails (fault.State, in use) while a Detached or State of it is open, including those of this
// process.
func (t *Target) Unmount() error {
	unmount := func() error { return linux.UnmountAt(t.parent, t.name) }
	err := unmount()
	if errors.Is(err, linux.EBUSY) {
		if err = t.takeOffSubmounts(); err == nil {
			err = linux.Outlast(unmount)
		}
	}
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use: a process has a file or its working directory there%s (see `fuser -vm %s`): %w", t.Path,
			usersOf(t.Path), t.Path, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", t.Path, err)
	}
	return nil
}

// Remove removes an empty directory or empty file at the target. It succeeds if nothing is
// there. Anything else stays, and is an error.
func (t *Target) Remove() error {
	s, err := t.look(false) // rmdir refuses a directory with entries
	if err != nil {
		return err
	}
	s.Close()
	switch s.Occupant {
	case Absent:
		return nil
	case EmptyDir:
		err = linux.Rmdirat(t.parent, t.name)
	case EmptyFile:
		err = linux.Unlinkat(t.parent, t.name)
	default:
		return t.refuse(s, "nothing")
	}
	switch {
	case err == nil, errors.Is(err, linux.ENOENT):
		return nil
	case errors.Is(err, linux.ENOTEMPTY), errors.Is(err, linux.EEXIST):
		s.Occupant = Data
		return t.refuse(s, "nothing")
	}
	return fmt.Errorf("%s: %w", t.Path, err)
}

// leadsTo resolves the target's path again from the root and reports whether it is the mount
// with that id.
func (t *Target) leadsTo(id uint64) (bool, error) {
	f, err := linux.Openat2(t.root.dir, t.rel, linux.OPath|linux.ONofollow,
		linux.ResolveBeneath|linux.ResolveNoSymlinks|linux.ResolveNoMagic)
	if errors.Is(err, linux.ENOENT) || errors.Is(err, linux.ELOOP) || errors.Is(err, linux.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	st, err := linux.StatxFile(f)
	return err == nil && st.MountID == id, err
}
