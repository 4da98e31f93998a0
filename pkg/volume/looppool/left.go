package looppool

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// left is a volume of a pool that is no longer configured on this node. Its record and file are
// not accessible. The kernel still shows which loop devices are bound to a file of its name,
// which contains a hash.
type left struct {
	id, name string
	loop     loopdev.Nodes
	claimed  func(mounter.Device) (bool, error)
}

// Left returns a Releaser for a volume of a pool that is not configured, or nil for an id that
// no pool has made. The function claimed reports whether a device belongs to a configured pool;
// such a device is never touched.
func Left(id, nodesDir string, claimed func(mounter.Device) (bool, error)) volume.Releaser {
	_, key, snapshot, ok := volume.ParseID(id)
	if !ok || snapshot {
		return nil
	}
	return left{id, key + ".img", loopdev.Nodes{Dir: nodesDir}, claimed}
}

// Foreign returns poolhome's Options.Foreign for pools of files. A device is foreign if it is no loop device, or if it shows a file that is
// not named like a volume's and is not held.
func Foreign(nodesDir string) func(mounter.Device) (bool, error) {
	return func(d mounter.Device) (bool, error) {
		shown, err := loopdev.BackingFile(d.Major, d.Minor)
		if err != nil || shown == "" {
			return err == nil, err
		}
		key, image := strings.CutSuffix(filepath.Base(shown), imageExtension)
		if _, _, _, ok := volume.ParseID("pool." + key); image && ok {
			return false, nil
		}
		// A pod can make its device show another file.
		_, held, err := loopdev.Nodes{Dir: nodesDir}.HeldFile(d.Major, d.Minor)
		return err == nil && !held, err
	}
}

func (l left) devices() ([]loopdev.Device, error) {
	all, err := l.loop.Named(l.name)
	if err != nil {
		return nil, err
	}
	var own []loopdev.Device
	for _, d := range all {
		other, err := l.claimed(device(d))
		if err != nil {
			return nil, fmt.Errorf("volume %s: whose %s is: %w", l.id, d.Path, err)
		}
		if other {
			continue
		}
		if len(own) > 0 && !d.SameFile(own[0]) {
			return nil, fault.New(fault.State,
				"volume %s: its pool is not configured, and %s and %s are over two files of its name; start the "+
					"driver with its pool again", l.id, own[0].Path, d.Path)
		}
		own = append(own, d)
	}
	return own, nil
}

// Attached returns the writable device.
func (l left) Attached(string) (volume.Attachment, bool, error) {
	own, err := l.devices()
	for _, d := range own {
		if !d.ReadOnly {
			return volume.Attachment{Device: device(d)}, true, nil
		}
	}
	return volume.Attachment{}, false, err
}

// Owns reports whether the device is one of the volume's.
func (l left) Owns(dev mounter.Device) (string, bool, error) {
	dev, err := rawdevice.Below(dev)
	if err != nil {
		return "", false, err
	}
	own, err := l.devices()
	for _, d := range own {
		if device(d).Same(dev) {
			return l.id, true, nil
		}
	}
	return "", false, err
}

// DetachReadOnly releases the read-only devices, except those in use.
func (l left) DetachReadOnly(_ context.Context, _ string, inUse []mounter.Device) error {
	inUse, err := rawdevice.AllBelow(inUse)
	if err != nil {
		return err
	}
	return l.detach(func(d loopdev.Device) bool { return d.ReadOnly && !slices.ContainsFunc(inUse, device(d).Same) })
}

// Detach releases all devices of the volume.
func (l left) Detach(context.Context, string) error {
	return l.detach(func(loopdev.Device) bool { return true })
}

func (l left) detach(which func(loopdev.Device) bool) error {
	own, err := l.devices()
	if err != nil {
		return err
	}
	for _, d := range own {
		if !which(d) {
			continue
		}
		if err := (rawdevice.Guard{Loops: l.loop}).Detach(d); err != nil {
			return detachError(l.id, d, err)
		}
	}
	return nil
}
