package driver

import (
	"fmt"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// unusable returns the error for a deferral whose record is unusable.
func (r deferral) unusable() error {
	if r.bad == nil {
		return nil
	}
	return fmt.Errorf("volume %s, deferred to the runtime of the pod at %s: %w; or end that pod", r.VolumeID, r.Target, r.bad)
}

// identifyDeferrals finds the volumes of deferrals whose records are unusable. A record's name is a
// hash of volume and target, and a deferral has a placeholder at its target. Without a placeholder,
// nobody was told of it or it has ended.
func (d *Driver) identifyDeferrals() error {
	if len(d.deferrals.bad) == 0 {
		return nil
	}
	var table []mounter.Mount
	err := d.HostNamespace.Do(func() error {
		root, err := mounter.OpenRoot(d.Root.Path())
		if err != nil {
			return err
		}
		defer root.Close()
		table, err = root.Table()
		return err
	})
	if err != nil {
		return fmt.Errorf("the host's mount namespace: %w", err)
	}
	for path, bad := range d.deferrals.bad {
		found, ok := d.deferralAt(path, table)
		d.Log.Error("a record cannot be used; everything else goes on without it", "file", path,
			"deferral_of", found.VolumeID, "at", found.Target, "error", bad)
		if ok {
			found.bad = bad
			d.deferrals.remember(found)
		} else if err := record.SetAside(path); err != nil {
			return err
		}
	}
	return nil
}

func (d *Driver) deferralAt(path string, table []mounter.Mount) (deferral, bool) {
	ids := sortedKeys(d.staged.all())
	for _, src := range d.sources() {
		for _, v := range src.List() {
			ids = append(ids, v.ID)
		}
	}
	for _, m := range table {
		for _, id := range ids {
			if r := (deferral{VolumeID: id, BootID: d.deferrals.boot, Target: m.Path}); m.Placeholder() && d.deferrals.path(r) == path {
				return r, true
			}
		}
	}
	return deferral{}, false
}
