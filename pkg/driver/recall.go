package driver

import (
	"slices"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// recall registers the devices of static volumes whose staged record was torn or cannot be used, if they may be in use. Otherwise the
// volume's pod could not end, and another volume could get the device.
func (d *Driver) recall(table []mounter.Mount) {
	static := d.Volumes.Static()
	if static == nil {
		return
	}
	for _, v := range static.List() {
		unusable := d.staged.unusable(v.ID) != nil
		if _, ok := d.staged.get(v.ID); ok || !unusable && !d.staged.wasTorn(v.ID) {
			continue
		}
		dev, ok := static.Recall(v.ID)
		if !ok {
			continue
		}
		if _, taken, _ := static.Owns(dev); taken { // an error is about what lies below the device
			continue // a volume that is certainly staged has it
		}
		// So that the devices on top of it, for pods that read it, count as the volume's.
		static.Remember(v.ID, dev)
		// No mount table shows a guest.
		deferred := len(d.deferrals.of(v.ID)) > 0 || d.deferrals.someUnusable()
		inUse := deferred || slices.ContainsFunc(table, func(m mounter.Mount) bool {
			id, ok, err := d.owner(m)
			return err != nil || ok && id == v.ID
		})
		if !unusable && !inUse {
			static.Release(v.ID) // a power loss tore the record: it is not staged
		}
	}
}
