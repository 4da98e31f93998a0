package mounter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// OpenTree makes a detached bind mount of the tree of mounts at path, including submounts:
// open_tree(2) with AT_RECURSIVE. It is for drivers that publish what is mounted already. A
// symbolic link in the path is an error: for a path below a Root, whose own path may have links,
// use [Target.OpenTree]. A path that is not a mount point is a fault State, because a directory
// there is on the node's own disk. What is mounted into the tree later, or unmounted, appears and
// disappears in the copy; nothing that happens to the copy reaches the tree.
func OpenTree(path string) (*Detached, error) {
	at, err := linux.Openat2(linux.CWD, path, linux.OPath, linux.ResolveNoSymlinks)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	return openTree(at, path)
}

// OpenTree is like the function OpenTree, for the tree of mounts at the target, such as a volume's staging path. Nothing there, or a
// symbolic link, is no mount point. It does not say whose mount that is: ask Shows before.
func (t *Target) OpenTree() (*Detached, error) {
	at, err := linux.Openat(t.parent, t.name, linux.OPath|linux.ONofollow, 0)
	if errors.Is(err, linux.ENOENT) {
		return nil, notMounted(t.Path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Path, err)
	}
	defer at.Close()
	return openTree(at, t.Path)
}

func openTree(at *os.File, path string) (*Detached, error) {
	st, err := linux.StatxFile(at)
	if err != nil {
		return nil, err
	}
	if !st.MountRoot {
		return nil, notMounted(path)
	}
	clone, err := linux.OpenTreeCloneRecursive(at)
	if err != nil {
		return nil, err
	}
	if err := linux.MountSetattr(clone, linux.MountAttr{Propagation: linux.PropagationSlave}, true); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), clone.Close())
	}
	return &Detached{mount: clone, isDir: st.IsDir(), what: path}, nil
}

func notMounted(path string) error {
	return fault.New(fault.State, "%s is no mount point: what lies there is not a volume's", path)
}

// takeOffSubmounts takes off what is mounted inside the topmost mount at the target, also where the mount is shared: in the mount namespace
// of the host, and in containers. It stops at a mount that is in use.
func (t *Target) takeOffSubmounts() error {
	below, err := t.submounts()
	if err != nil {
		return err
	}
	for _, rel := range slices.Backward(below) { // the last mount is on top
		if err := t.unmountInside(rel); err != nil {
			return fmt.Errorf("what is mounted inside, at %s: %w", rel, err)
		}
	}
	return nil
}

// submounts returns the paths, relative to the target, of what is mounted inside its topmost mount: a mount comes after the one it is in.
func (t *Target) submounts() ([]string, error) {
	f, err := linux.Openat(t.parent, t.name, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return nil, err
	}
	id, err := classicMountID(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(infos, func(i *mountinfo.Info) bool { return i.ID == id })
	if at < 0 {
		return nil, nil // it was unmounted just now
	}
	inside := map[int]bool{id: true}
	var below []string
	for _, i := range inOrder(infos, inside) {
		rel, ok := strings.CutPrefix(i.Mountpoint, strings.TrimSuffix(infos[at].Mountpoint, "/")+"/")
		if ok {
			below = append(below, rel)
		}
	}
	return below, nil
}

// inOrder returns the mounts whose parents are in the set, and their children, parents first.
func inOrder(infos []*mountinfo.Info, inside map[int]bool) []*mountinfo.Info {
	var found []*mountinfo.Info
	for {
		before := len(found)
		for _, i := range infos {
			if inside[i.Parent] && !inside[i.ID] {
				inside[i.ID] = true
				found = append(found, i)
			}
		}
		if len(found) == before {
			return found
		}
	}
}

// unmountInside unmounts what is at a path inside the target. Directories on the way belong to the volume, and so to its pods: a link that
// they put there is not followed.
func (t *Target) unmountInside(rel string) error {
	dir, err := linux.Openat2(t.parent, filepath.Join(t.name, filepath.Dir(rel)), linux.OPath|linux.ODirectory,
		linux.ResolveBeneath|linux.ResolveNoSymlinks|linux.ResolveNoMagic)
	if err != nil {
		return err
	}
	defer dir.Close()
	return linux.Outlast(func() error { return linux.UnmountAt(dir, filepath.Base(rel)) })
}
