package driver

import (
	"fmt"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// A guest's kernel may have written anything to a volume that was left to it. To
// mount, check or grow such a file system here is to have this node's kernel, or
// programs of its root, parse what a pod has made. So that a volume was given to a
// guest is a fact that stays with it and with its copies.

// withheld refuses what would have this node parse a volume's file system after a
// guest had it; nil where nothing forbids that. allowed is what the volume's class
// says (hostMayMount).
func withheld(v volume.Volume, allowed bool, what string) error {
	if !v.Facts.GivenToGuest || allowed {
		return nil
	}
	return fault.New(fault.State, "volume %s was given to a guest (runtime-assisted mount), which may have written anything to it, so it "+
		"is not %s by this node's kernel: "+
		"use it in pods whose runtime mounts it in a guest, or say hostMayMount: \"true\" in its StorageClass (docs/crust.md tells what that means)", v.ID, what)
}

// withheldHere is withheld for a volume as it was staged.
func (d *Driver) withheldHere(src volume.Source, id, what string) error {
	v, err := src.Get(id)
	if err != nil {
		return err
	}
	r, _ := d.staged.get(id)
	return withheld(v, r.HostMayMount, what)
}

// noteGuest writes down that a volume goes to a guest, before anybody is told. A
// runtime whose sandboxes share this kernel is none.
func (d *Driver) noteGuest(p *publication) error {
	if p.attachment.Share != nil || p.attrs.hostKernel {
		return nil
	}
	v, err := p.src.Get(p.id)
	if err != nil || v.Facts.GivenToGuest {
		return err
	}
	v.Facts.GivenToGuest = true
	if err := p.src.SetFacts(p.id, v.Facts); err != nil {
		return fmt.Errorf("that volume %s is given to a guest could not be written down: %w", p.id, err)
	}
	return nil
}
