package sandbox

import (
	"maps"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// claim refuses a device that another sandbox has: no device is mounted in two at once if one
// writes (C19). It also refuses nested targets in one sandbox. It returns the other sandboxes that read the device.
func (m *Manager) claim(id string, v Volume) (readers []Sandbox, err error) {
	if err := m.mayBeOfAnother(id, v); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for other, b := range m.sandboxes {
		for source, r := range b.record.Volumes {
			switch {
			case other == id && source == v.Device.Path:
			case r.Device.Same(v.Device) && (!r.ReadOnly || !v.ReadOnly):
				return nil, fault.New(fault.State,
					"device %s is in use by sandbox %s, at %s: a file system cannot be mounted in two places at "+
						"once, unless both only read", v.Device.Path, other, r.Target)
			case r.Device.Same(v.Device):
				readers = append(readers, b.sandbox())
			case other == id && (within(r.Target, v.Target) || within(v.Target, r.Target)):
				return nil, fault.New(fault.State, "sandbox %s has device %s at %s; %s is the same place, or one lies in the other",
					id, source, r.Target, v.Target)
			}
		}
	}
	return readers, nil
}

// mayBeOfAnother refuses a device that is in use but in no record, while some records are unusable.
func (m *Manager) mayBeOfAnother(id string, v Volume) error {
	if len(m.bad) == 0 {
		return nil
	}
	known := false // claim has decided
	m.mu.Lock()
	for _, b := range m.sandboxes {
		for _, r := range b.record.Volumes {
			known = known || r.Device.Same(v.Device)
		}
	}
	m.mu.Unlock()
	if known {
		return nil
	}
	busy, err := mounter.Busy(v.Device.Path) // it may hang
	if err == nil && !busy {
		busy = len(mounter.UsedBy(v.Device)) > 0 // a hypervisor may have it open without O_EXCL
	}
	if err != nil || !busy {
		return err
	}
	path := slices.Sorted(maps.Keys(m.bad))[0]
	return fault.New(fault.State,
		"device %s is in use, and may be in that of a sandbox whose record cannot be used (%w): end that sandbox%s",
		v.Device.Path, m.bad[path], mounter.HeldBy(v.Device).After("; "))
}

// within tells whether path is dir or below it; both are clean.
func within(path, dir string) bool {
	rest, ok := strings.CutPrefix(path, dir)
	return ok && (rest == "" || rest[0] == '/')
}
