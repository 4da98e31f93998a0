package driver

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// deferral says that a pod's runtime mounts a volume, not this node (KEP-2857). It is written
// before the orchestrator is told, and removed after the placeholder. While it exists, nothing on
// this node mounts, checks or grows the volume. A reboot ends every sandbox, and so the deferral.
type deferral struct {
	VolumeID string            `json:"volumeID"`
	BootID   string            `json:"bootID"`
	Target   string            `json:"target"`
	Source   string            `json:"source"` // the device, or server:/share
	Type     string            `json:"type"`
	Options  map[string]string `json:"options,omitempty"`

	bad error // unusable record: only volume and target are known
}

// A newer version is refused at start: a driver that does not understand a deferral must not touch
// the volume.
var deferralType = record.Type{Kind: "crust-csi.deferral", Version: 1}

// deferrals has several of a volume only if all sandboxes read.
type deferrals struct {
	dir  record.Dir[deferral]
	boot string
	mu   sync.Mutex
	m    map[string]map[string]deferral // by volume and target
	bad  map[string]error               // unusable records, by path
}

func loadDeferrals(dir, boot string) (*deferrals, error) {
	d := &deferrals{boot: boot, m: map[string]map[string]deferral{}, bad: map[string]error{},
		dir: record.Dir[deferral]{Path: dir, Type: deferralType}}
	err := d.dir.Load(func(path string, r deferral, err error) error {
		switch {
		case fault.Is(err, fault.State): // of a newer version
			return err
		case err != nil:
			d.bad[path] = record.Unusable(err)
			return nil
		}
		if r.BootID == boot {
			d.remember(r)
			if path == d.path(r) {
				return nil
			}
			// An older driver kept one per volume, under another name.
			if err := deferralType.Write(d.path(r), r); err != nil {
				return err
			}
		}
		return record.Remove(path)
	})
	if err != nil {
		return nil, fmt.Errorf("a deferred volume: %w", err)
	}
	return d, nil
}

func (d *deferrals) path(r deferral) string { return d.dir.File(record.Name(r.VolumeID, r.Target)) }

func (d *deferrals) remember(r deferral) {
	if d.m[r.VolumeID] == nil {
		d.m[r.VolumeID] = map[string]deferral{}
	}
	d.m[r.VolumeID][r.Target] = r
}

// someUnusable tells whether a record cannot be used, so that it is not known of which volume it is.
func (d *deferrals) someUnusable() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.bad) > 0
}

// hasTarget tells whether a volume is deferred at the target.
func (d *deferrals) hasTarget(target string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, all := range d.m {
		if _, ok := all[target]; ok {
			return true
		}
	}
	return false
}

// of returns a volume's deferrals, by target.
func (d *deferrals) of(id string) []deferral {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Values(d.m[id]), func(a, b deferral) int { return strings.Compare(a.Target, b.Target) })
}

func (d *deferrals) at(id, target string) (deferral, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, ok := d.m[id][target]
	return r, ok
}

func (d *deferrals) put(r deferral) error {
	r.BootID = d.boot
	err := deferralType.Write(d.path(r), r)
	if err != nil {
		// The record may be there, as when its directory could not be synced. No caller learns of this deferral, so none will end it, and
		// the next start must not find it. If it stays, it is in force from now on: then an unpublish ends it.
		rerr := record.RemoveVolatile(d.path(r))
		err = volume.NotNoted(r.VolumeID, "that it is deferred at "+r.Target, errors.Join(err, rerr))
		if rerr == nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remember(r)
	return err
}

func (d *deferrals) remove(r deferral) error {
	remove := record.Remove
	if r.bad != nil {
		remove = record.SetAside
	}
	if err := remove(d.path(r)); err != nil {
		return volume.NotNoted(r.VolumeID, "that it is no longer deferred at "+r.Target, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.m[r.VolumeID], r.Target)
	if len(d.m[r.VolumeID]) == 0 {
		delete(d.m, r.VolumeID)
	}
	return nil
}

func (r deferral) readOnly() bool {
	_, ok := r.Options["ro"]
	return ok
}

func targetsOf(all []deferral) string {
	var at []string
	for _, r := range all {
		at = append(at, r.Target)
	}
	return strings.Join(at, ", ")
}
