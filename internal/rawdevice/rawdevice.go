// Package rawdevice decides what a pod with a raw block volume is given the node
// of. A loop device takes ioctls that change what it shows, and unbind it, from
// anybody who has it open, with no capability at all. So a pod is never given a
// bare one; docs/raw-block.md says what that leaves.
package rawdevice

import (
	"errors"
	"fmt"

	"github.com/crust-csi/crust-csi/internal/devmapper"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Guard makes loop devices ready for pods.
type Guard struct{ Loops loopdev.Nodes }

// Publish gives the device whose node a pod may have, and d as it is then. Detach
// undoes it. Where the kernel has device-mapper the pod gets a mapped device,
// which passes no ioctl on; elsewhere the loop device itself, held.
func (g Guard) Publish(d loopdev.Device) (published mounter.Device, now loopdev.Device, err error) {
	if !d.Held { // or pods have its node already
		published, err = g.mapped(d)
		if err == nil || !errors.Is(err, devmapper.ErrAbsent) && !errors.Is(err, errInUse) {
			return published, d, err
		}
	}
	if now, err = g.Loops.Hold(d); err != nil {
		return mounter.Device{}, d, err
	}
	return mounter.Device{Path: d.Path, Major: d.Major, Minor: d.Minor, ReadOnly: d.ReadOnly}, now, nil
}

// Release takes off what Publish put on a device that the caller goes on to have.
func (g Guard) Release(d loopdev.Device) error {
	if err := g.unmap(d); err != nil {
		return err
	}
	return g.Loops.Release(d)
}

// Detach unbinds the device, and undoes Publish before. It is refused while
// anybody uses either.
func (g Guard) Detach(d loopdev.Device) error {
	if err := g.unmap(d); err != nil {
		return err
	}
	return g.Loops.Detach(d)
}

// Describe says what pods are given on this node, and why. A node may be made in
// dir.
func Describe(dir string) string {
	c, err := devmapper.Open(dir)
	const name = "raw block volumes: "
	switch {
	case err == nil:
		c.Close()
		return name + "mapped (pods get a device-mapper device, which passes no ioctl on)"
	case errors.Is(err, devmapper.ErrAbsent):
		return name + "held (this kernel has no device-mapper: pods get the node of a loop device that the driver keeps bound, and what they " +
			"change of it is set back)"
	}
	return fmt.Sprintf("%scannot tell (%v): publishing one will tell", name, err)
}

// HeldAilment says that a pod has the node of a loop device; it is no fault.
var HeldAilment = mounter.Ailment{
	Reason: "RawDeviceHeld", Informational: true,
	Message: "pods have the node of the volume's loop device: they cannot unbind it, and what else they change is set back at the next " +
		"call (docs/raw-block.md)",
}
