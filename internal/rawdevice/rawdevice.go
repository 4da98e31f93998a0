// Package rawdevice decides which node a pod with a raw block volume gets. Anybody who has a loop
// device open can use ioctls that change what it shows, or unbind it, without any capability. So a
// pod never gets a bare one; docs/raw-block.md describes what remains possible.
package rawdevice

import (
	"errors"
	"fmt"

	"github.com/crust-csi/crust-csi/internal/devmapper"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Guard makes loop devices safe for pods.
type Guard struct{ Loops loopdev.Nodes }

// Publish returns the device whose node a pod may have, and the new state of d. Detach undoes it.
// If the kernel has device-mapper the pod gets a mapped device, which passes no ioctl on; otherwise
// the loop device itself, held.
func (g Guard) Publish(d loopdev.Device) (published mounter.Device, now loopdev.Device, err error) {
	if !d.Held { // otherwise pods already have its node
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

// Release undoes Publish on a device that the caller continues to use.
func (g Guard) Release(d loopdev.Device) error {
	if err := g.unmap(d); err != nil {
		return err
	}
	return g.Loops.Release(d)
}

// Detach undoes Publish and unbinds the device. It is refused while anybody uses either.
func (g Guard) Detach(d loopdev.Device) error {
	if err := g.unmap(d); err != nil {
		return err
	}
	return g.Loops.Detach(d)
}

// Describe describes what pods get on this node, and why. It may make a node in dir.
func Describe(dir string) string {
	c, err := devmapper.Open(dir)
	const name = "raw block volumes: "
	switch {
	case err == nil:
		c.Close()
		return name + "mapped (pods get a device-mapper device, which passes no ioctl on)"
	case errors.Is(err, devmapper.ErrAbsent):
		return name +
			"held (this kernel has no device-mapper: pods get the node of a loop device that the driver keeps bound, and what they " +
			"change of it is set back)"
	}
	return fmt.Sprintf("%scannot tell (%v): publishing one will tell", name, err)
}

// HeldAilment reports that a pod has the node of a loop device; it is not a fault.
var HeldAilment = mounter.Ailment{
	Reason: "RawDeviceHeld", Informational: true,
	Message: "pods have the node of the volume's loop device: they cannot unbind it, and what else they change is set back at the next " +
		"call (docs/raw-block.md)",
}
