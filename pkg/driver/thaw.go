package driver

import (
	"errors"
	"fmt"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// thaw ends a freeze that a crash left.
func (d *Driver) thaw(s volume.Source, id string) error {
	a, ok, err := s.Attached(id)
	if err != nil || !ok {
		if fault.Is(err, fault.NotFound) {
			err = nil
		}
		return err
	}
	busy, err := mounter.Busy(a.Device.Path)
	if err != nil || !busy {
		return err
	}
	v, err := s.Get(id)
	name := v.Facts.Formatted
	if errors.Is(err, volume.ErrUnusable) { // the rest of the pool must not wait for a human
		if r, ok := d.staged.get(id); ok && r.FSType != "" {
			name, err = r.FSType, nil
		} else {
			name, err = d.mountedType(a.Device)
		}
	} else if err == nil {
		if withheld := d.withheldHere(s, id, "thawed"); withheld != nil {
			if _, ok := d.staged.get(id); !ok {
				return fmt.Errorf("it is in use, and how it was staged is not known: %w", withheld)
			}
			return nil // so this node did not freeze it either
		}
	}
	if r, ok := d.staged.get(id); err != nil || name == "" || ok && r.Block {
		return err
	}
	fs, err := d.live(a.Device, id, name)
	if err != nil {
		return err
	}
	return mounter.Thaw(fs)
}

// mountedType returns the type of the file system of a device that is mounted for a pod, empty if
// it is not.
func (d *Driver) mountedType(dev mounter.Device) (string, error) {
	table, err := d.Root.Table()
	if err != nil {
		return "", err
	}
	var unknown error
	for _, m := range table {
		m.Part = false // the device that the file system is on, not one whose node is bound
		found, ok, err := m.Device()
		if err == nil && ok && found.Same(dev) {
			return m.Type, nil
		}
		if err != nil && found.Path == dev.Path {
			unknown = errors.Join(unknown, err)
		}
	}
	return "", unknown
}
