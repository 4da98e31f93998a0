package podvm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podguest"
)

// A pod has two views of one directory. Its files and directories are made in "tree", which only the host sees. The guest sees "shared",
// where that directory is read-only and what containers are given is mounted. So the guest's kernel, which is the tenant's, cannot change
// the paths that the host walks.

// view mounts the guest's view of the pod's directory. Mounts that come later below it reach virtiofsd, whose mount namespace is a copy.
func (p *Pod) view() error {
	from, err := linux.Open(p.at("tree"), linux.OPath)
	if err != nil {
		return err
	}
	defer from.Close()
	mount, err := linux.OpenTreeClone(from)
	if err != nil {
		return err
	}
	defer mount.Close()
	attr := linux.MountAttr{Set: linux.MountAttrRdonly, Propagation: linux.PropagationShared}
	if err := linux.MountSetattr(mount, attr, false); err != nil {
		return err
	}
	return attach(mount, p.at("shared"))
}

func attach(mount *os.File, target string) error {
	to, err := linux.Open(target, linux.OPath|linux.ONofollow)
	if err != nil {
		return err
	}
	defer to.Close()
	return linux.MoveMount(mount, to)
}

// access is what a container may do with a mount.
type access struct {
	readOnly bool   // the host lets the guest's kernel write nothing
	follows  bool   // what the host mounts below it later appears there, too
	users    *users // whose the ids in it are: nil for the host's
}

// share mounts a host's file or directory below the directory that the guest sees, for a container only.
func (p *Pod) share(container, name, source string, a access) error {
	from, err := linux.Open(source, linux.OPath)
	if err != nil {
		return err
	}
	defer from.Close()
	return p.shareFile(from, source, filepath.Join(container, name), a)
}

// shareCommon mounts a host's file or directory for a container, and returns where the guest has it, below Shared. Containers that are
// given the same one get the same mount: only then is it one file system for the guest, whose locks, sockets and memory maps they have in
// common.
// A container that may only read gets a writable mount if another container has that: the guest's own mount of it is read-only.
func (p *Pod) shareCommon(container, source string, a access) (place string, err error) {
	from, err := linux.Open(source, linux.OPath)
	if err != nil {
		return "", err
	}
	defer from.Close()
	st, err := linux.StatxFile(from)
	if err != nil {
		return "", err
	}
	unlock, err := p.lockCommon(os.O_CREATE)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := os.MkdirAll(filepath.Join(p.at("tree"), podguest.Common), 0o755); err != nil {
		return "", err
	}
	there, err := entries(filepath.Join(p.at("tree"), podguest.Common))
	if err != nil {
		return "", err
	}
	key := fmt.Sprintf("%d-%d-%d-%d", st.DevMajor, st.DevMinor, st.Ino, st.MountID)
	if a.follows {
		key += "-follows"
	}
	if a.users != nil {
		key += fmt.Sprintf("-of-%d-%d", a.users.UID, a.users.GID)
	}
	var name string
	for _, n := range there {
		kind, found := strings.CutPrefix(n, key+"~")
		if !found || !a.readOnly && strings.HasPrefix(kind, "ro") {
			continue
		}
		mount, err := linux.StatxPath(filepath.Join(p.at("shared"), podguest.Common, n))
		if err != nil {
			return "", err
		}
		if mount.MountRoot { // or a call was interrupted
			name = n
		}
	}
	fresh := name == ""
	if fresh { // the guest remembers what had a name before
		kind := "rw"
		if a.readOnly {
			kind = "ro"
		}
		name = key + "~" + kind + rand.Text()[:8]
	}
	place = filepath.Join(podguest.Common, name)
	mark := filepath.Join(p.at("tree"), container, name)
	if err := linux.MakeFile(mark); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	if !fresh {
		return place, nil
	}
	return place, p.shareFile(from, source, place, a)
}

// lockCommon keeps other processes from changing what containers have in common.
func (p *Pod) lockCommon(create int) (unlock func(), err error) {
	f, err := os.OpenFile(p.at("common-lock"), create|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockTime)
	defer cancel()
	if err := linux.FlockWithin(ctx, f); err != nil {
		f.Close()
		return nil, fmt.Errorf("other containers of pod %s are being made or deleted: %w", p.ID, err)
	}
	return func() { f.Close() }, nil
}

// sweepCommon removes what no container has any more.
func (p *Pod) sweepCommon() error {
	there, err := entries(filepath.Join(p.at("tree"), podguest.Common))
	if err != nil || len(there) == 0 {
		return err
	}
	containers, err := entries(p.at("tree"))
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, c := range containers {
		if c == podguest.Common {
			continue
		}
		names, err := entries(filepath.Join(p.at("tree"), c))
		if err != nil {
			return err
		}
		for _, n := range names {
			used[n] = true
		}
	}
	for _, n := range there {
		if !used[n] {
			if err := p.unshareOne(podguest.Common, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// shareFile mounts an open file or directory of the host at a place below the directory that the guest sees.
func (p *Pod) shareFile(from *os.File, source, at string, a access) error {
	st, err := linux.StatxFile(from)
	if err != nil {
		return err
	}
	place := filepath.Join(p.at("tree"), at)
	switch {
	case st.IsDir():
		err = os.Mkdir(place, 0o755)
	case st.IsBlock():
		return fmt.Errorf("%s is a block device, and those of the host do not exist in a microVM", source)
	default:
		err = linux.MakeFile(place)
	}
	if err != nil {
		return err
	}
	mount, err := linux.OpenTreeCloneRecursive(from)
	if err != nil {
		return err
	}
	defer mount.Close()
	// The copies are peers of the host's mounts: if they remained so, unmounting them would unmount those.
	attr := linux.MountAttr{Propagation: linux.PropagationPrivate}
	switch {
	case a.readOnly:
		attr.Set = linux.MountAttrRdonly
	case a.follows: // a mount that comes later would be writable
		attr.Propagation = linux.PropagationSlave
	}
	if err := linux.MountSetattr(mount, attr, true); err != nil {
		return err
	}
	if a.users != nil {
		if err := a.users.mapOnto(mount); err != nil {
			return err
		}
	}
	return attach(mount, filepath.Join(p.at("shared"), at))
}

// unshare removes what was shared for a container, and what no other has in common with it.
func (p *Pod) unshare(container string) error {
	unlock, err := p.lockCommon(0)
	if err == nil {
		defer unlock()
	} else if !errors.Is(err, os.ErrNotExist) { // nothing was ever in common
		return err
	}
	names, err := entries(filepath.Join(p.at("tree"), container))
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := p.unshareOne(container, n); err != nil {
			return err
		}
	}
	if err := remove(filepath.Join(p.at("tree"), container)); err != nil {
		return err
	}
	return p.sweepCommon()
}

func (p *Pod) unshareOne(container, name string) error {
	if err := detach(filepath.Join(p.at("shared"), container, name)); err != nil {
		return err
	}
	return remove(filepath.Join(p.at("tree"), container, name)) // an empty file or directory, which was mounted on
}

// unshareAll removes what was shared for all containers.
func (p *Pod) unshareAll() error {
	containers, err := entries(p.at("tree"))
	if err != nil {
		return err
	}
	for _, c := range containers {
		if err := p.unshare(c); err != nil {
			return err
		}
	}
	return nil
}

// detach removes the mounts on path. Whatever uses a mount keeps it until it is done.
func detach(path string) error {
	for {
		f, err := linux.Open(path, linux.OPath|linux.ONofollow)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, err := linux.StatxFile(f)
		if err == nil && st.MountRoot {
			err = linux.DetachFile(f)
		}
		f.Close()
		if err != nil || !st.MountRoot {
			return err
		}
	}
}

// remove removes a pod's files, and the mounts among them. Its processes have ended. Another call may do the same at the same time.
func (p *Pod) remove() error {
	if err := p.unshareAll(); err != nil {
		return err
	}
	if err := detach(p.at("shared")); err != nil {
		return err
	}
	for _, d := range []string{"containers", "started", "stub", ""} {
		names, err := entries(p.at(d))
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := remove(filepath.Join(p.at(d), n)); err != nil {
				return err
			}
		}
	}
	return remove(p.dir)
}

// remove removes a file or an empty directory. One that is not there is fine.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// entries returns the names in a directory: none if it is not there.
func entries(dir string) (names []string, err error) {
	found, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names, nil
}
