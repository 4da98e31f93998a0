package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Slots keeps the slots of one sandbox in a directory. A slot is a file system that nobody can write to, with the directory
// crust.SlotVolume. It is a shared mount, so what is mounted on that directory appears in every container that has the slot as a slave
// (mount_namespaces(7)). The kernel knows what a slot shows, and nothing else is written down. All methods work in the mount namespace
// of this thread, and the caller holds the lock.
type Slots struct {
	sync.Mutex
	Dir string
}

// slotSource is a slot's source in the mount table.
const slotSource = "crust-slot"

// target is where a slot shows a volume. A slot that does not exist is a fault NotFound.
func (s *Slots) target(name string, f func(*mounter.Target) error) error {
	root, err := mounter.OpenRoot(s.Dir)
	if err != nil {
		return err
	}
	defer root.Close()
	t, err := root.Target(filepath.Join(s.Dir, name, crust.SlotVolume))
	if err != nil {
		return err
	}
	defer t.Close()
	return f(t)
}

// Prepare returns the path of a slot. It makes the slot, unless there is one.
func (s *Slots) Prepare(name string) (string, error) {
	if err := crust.CheckSlot(name); err != nil {
		return "", err
	}
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return "", err
	}
	root, err := mounter.OpenRoot(s.Dir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	path := filepath.Join(s.Dir, name)
	t, err := root.Target(path)
	if err != nil {
		return "", err
	}
	defer t.Close()
	st, err := t.Glance()
	if err != nil {
		return "", err
	}
	st.Close()
	if st.Occupant != mounter.MountPoint {
		d, err := mounter.OpenShelf(slotSource, crust.SlotVolume)
		if err != nil {
			return "", err
		}
		defer d.Close()
		if err := d.Attach(t); err != nil {
			return "", err
		}
	}
	// Again, if an earlier call was killed before it.
	place, err := linux.Openat(linux.CWD, path, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return "", err
	}
	defer place.Close()
	return path, linux.MountSetattr(place, linux.MountAttr{Propagation: linux.PropagationShared}, false)
}

// Bind shows the directory that from is open on in a slot. Repeated, it succeeds. A slot that shows something else is a fault Exists.
func (s *Slots) Bind(name string, from *os.File, readOnly bool) error {
	if err := crust.CheckSlot(name); err != nil {
		return err
	}
	want, err := linux.StatxFile(from)
	if err != nil {
		return err
	}
	if !want.IsDir() {
		return fault.New(fault.Invalid, "a slot shows a directory, and this is a file")
	}
	clone, err := linux.OpenTreeClone(from)
	if err != nil {
		return fmt.Errorf("slot %s: %w", name, err)
	}
	defer clone.Close()
	if readOnly {
		if err := linux.MountSetattr(clone, linux.MountAttr{Set: linux.MountAttrRdonly}, false); err != nil {
			return fmt.Errorf("slot %s: %w", name, err)
		}
	}
	there := false
	err = s.target(name, func(t *mounter.Target) error {
		st, err := t.Glance()
		if err != nil {
			return err
		}
		defer st.Close()
		switch st.Occupant {
		case mounter.Absent: // somebody was killed while making the slot
			return nil
		case mounter.MountPoint:
			there = true
			return s.shows(t, st, want, clone)
		}
		there = true
		place, err := linux.Openat(linux.CWD, t.Path, linux.OPath|linux.ONofollow|linux.ODirectory, 0)
		if err != nil {
			return err
		}
		defer place.Close()
		return linux.MoveMount(clone, place)
	})
	if fault.Is(err, fault.NotFound) || err == nil && !there {
		return fault.New(fault.State, "no container of the sandbox has the slot %s: one is started with a mount whose source is %s", name,
			filepath.Join(crust.SlotsDir, name))
	}
	if err != nil {
		return fmt.Errorf("slot %s: %w", name, err)
	}
	return nil
}

// shows returns nil if a slot that is not empty shows what it is to show.
func (s *Slots) shows(t *mounter.Target, st *mounter.State, want linux.Statx, clone *os.File) error {
	other := fault.New(fault.Exists, "it shows another directory, or the same with other access; unbind it first")
	place, err := linux.Openat(linux.CWD, t.Path, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return err
	}
	defer place.Close()
	now, err := linux.StatxFile(place)
	if errors.Is(err, linux.EIO) { // a file system that has stopped
		return other
	}
	if err != nil {
		return err
	}
	if now.DevMajor != want.DevMajor || now.DevMinor != want.DevMinor || now.Ino != want.Ino {
		return other
	}
	m, err := st.Mount()
	if err != nil || m.ReadOnlySB { // then all access is alike
		return err
	}
	will, err := linux.Fstatfs(clone)
	if err == nil && m.ReadOnly != (will.Flags&linux.StRdonly != 0) {
		err = other
	}
	return err
}

// Unbind empties a slot. It succeeds if the slot is empty or does not exist. A volume that a container uses there stays, which is a
// fault State.
func (s *Slots) Unbind(name string) error {
	if err := crust.CheckSlot(name); err != nil {
		return err
	}
	err := s.target(name, func(t *mounter.Target) error {
		for {
			st, err := t.Glance()
			if err != nil {
				return err
			}
			st.Close()
			if st.Occupant != mounter.MountPoint {
				return nil
			}
			if err := t.Unmount(); err != nil {
				return fmt.Errorf("slot %s: %w", name, err)
			}
		}
	})
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

// EmptyAll empties the slots that show a device's file system. After an error, some may be empty.
func (s *Slots) EmptyAll(d mounter.Device) error {
	names, err := os.ReadDir(s.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, n := range names {
		shown := false
		err := s.target(n.Name(), func(t *mounter.Target) error {
			st, err := t.Glance()
			if err != nil {
				return err
			}
			defer st.Close()
			if st.Occupant != mounter.MountPoint {
				return nil
			}
			// If that cannot be told of another volume, this one can leave all the same.
			have, ok, err := st.Device()
			shown = err == nil && ok && have.Same(d)
			return nil
		})
		if shown {
			err = s.Unbind(n.Name())
		}
		if !fault.Is(err, fault.NotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Remove removes the slots' directories after the end of the mount namespace that the slots were in.
func (s *Slots) Remove() error {
	names, err := os.ReadDir(s.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, n := range names {
		errs = append(errs, os.Remove(filepath.Join(s.Dir, n.Name())))
	}
	return errors.Join(append(errs, os.Remove(s.Dir))...)
}
