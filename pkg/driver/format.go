package driver

import (
	"fmt"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// resume examines a device on which a format began and is not known to have ended. An administrator may have made another file system on a
// static device since: the driver takes one that it finds.
func (d *Driver) resume(v volume.Volume, dev mounter.Device) (superblock.Result, superblock.BlankDevice, error) {
	if _, pool := d.Volumes.OwnerOf(v.ID); !pool {
		if found, err := superblock.ProbeDevice(dev.Path); err != nil || found.Content == superblock.Known {
			return found, superblock.BlankDevice{}, err
		}
	}
	return superblock.Resume(dev.Path, *v.Facts.Formatting)
}

// mayFormat refuses to format what somebody may have written to, before any closer look.
func (d *Driver) mayFormat(v volume.Volume, dev mounter.Device, found superblock.Result, blank superblock.BlankDevice) error {
	_, pool := d.Volumes.OwnerOf(v.ID)
	switch {
	case found.Content == superblock.Known:
		return nil
	case pool && v.Facts.GivenRaw && (found.Content == superblock.Blank || blank.Path() != ""):
		return fault.New(fault.State, "volume %s: %s was given out as a raw block device before, so it is not formatted, "+
			"though it holds no known format: its data may be anywhere; if it may go, delete the volume (or wipe the device) and create it anew",
			v.ID, dev.Path)
	case !pool && blank.Path() != "" && found.Content != superblock.Blank:
		// The path may name another disk than when the format began.
		return fault.New(fault.State, "volume %s: formatting %s was begun and did not end, and it holds %s: "+
			"this may be another device than then, so it is not formatted again; its data may be anywhere; if it may go, "+
			"wipe the device (`wipefs -a %s`)", v.ID, dev.Path, found, dev.Path)
	}
	return nil
}

// wayOut says what to do about a volume whose data is lost.
func (d *Driver) wayOut(id string, dev mounter.Device, want string) string {
	if _, pool := d.Volumes.OwnerOf(id); pool {
		return "restore a snapshot, or delete the volume"
	}
	return fmt.Sprintf("restore its data, or make the file system yourself (`mkfs.%s %s`): the driver takes one that it finds",
		want, dev.Path)
}
