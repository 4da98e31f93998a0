package driver

import (
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// A guest's kernel may have written anything to a volume that it had. To mount, check or grow such
// a file system here would make this node's kernel, or its root's programs, parse what a pod has
// made. So the volume and its copies keep the fact that a guest had it.

// withheld returns an error if this node would parse a volume's file system after a guest had it.
// allowed is hostMayMount of the volume's class.
func withheld(v volume.Volume, allowed bool, what string) error {
	if !v.Facts.GivenToGuest || allowed {
		return nil
	}
	return fault.New(fault.State, "volume %s was given to a guest (runtime-assisted mount), or this node cannot tell whether it was. "+
		"A guest may have written anything to it, so it is not %s by this node's kernel: "+
		"use it in pods whose runtime mounts it in a guest, or clone its claim with a class that has hostMayMount: \"true\" (docs/crust.md)",
		v.ID, what)
}

// withheldHere is withheld for a staged volume.
func (d *Driver) withheldHere(src volume.Source, id, what string) error {
	v, err := src.Get(id)
	if err != nil {
		return err
	}
	r, _ := d.staged.get(id)
	return withheld(v, r.HostMayMount, what)
}

// noteGuest records that a volume goes to a guest, before anybody is told. It does so each time: the
// volume's source notes it of other volumes on the same disk, too, which may be new. A runtime whose
// sandboxes share this kernel is no guest.
func (d *Driver) noteGuest(p *publication) error {
	if p.attachment.Share != nil || p.attrs.hostKernel {
		return nil
	}
	v, err := p.src.Get(p.id)
	if err == nil {
		v.Facts.GivenToGuest = true
		err = p.src.SetFacts(p.id, v.Facts)
	}
	if err != nil {
		// After this code the kubelet still unpublishes, which ends the deferral.
		return fault.New(fault.Unavailable, "that volume %s is given to a guest could not be written down: %w", p.id, err)
	}
	return nil
}
