package mounter

import "github.com/crust-csi/crust-csi/pkg/fault"

// Shows reports whether the device is mounted at the target: its file system, a directory of it, or the device's node. Nothing
// mounted there is false. Another mount is a fault State.
func (t *Target) Shows(device Device) (bool, error) {
	state, err := t.Look()
	if err != nil {
		return false, err
	}
	defer state.Close()
	if state.Occupant != MountPoint {
		return false, nil
	}
	shown, ok, err := state.Device()
	if err == nil && (!ok || !device.Same(shown)) {
		err = fault.New(fault.State, "%s is a mount of something else than the volume; it was left alone", t.Path)
	}
	return err == nil, err
}

// Clear takes one mount of the device off the target and removes the target, as NodeUnpublishVolume has to. A target that does
// not exist is cleared. For a network share, which has no device, compare Look's Mount, then call
// Unmount and Remove. What is not the device's, or holds data, is left alone, and is a fault State; so is a mount in use.
func (t *Target) Clear(device Device) error {
	mounted, err := t.Shows(device)
	if err == nil && mounted {
		err = t.Unmount()
	}
	if err != nil {
		return err
	}
	return t.Remove()
}
