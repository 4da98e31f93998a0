package driver

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// damage is what a check found that only a person can repair.
type damage struct {
	fingerprint string // of the superblock at that time
	said        string // the program's output
	when        time.Time
}

// damagedVolumes remembers checks that ended with "needs a person". The orchestrator retries while
// the pod exists, and a check of a large volume takes minutes. It runs again only if the superblock
// changed, after an unstage, or in another process. A deleted volume is forgotten.
type damagedVolumes struct {
	mu sync.Mutex
	m  map[string]damage
}

func (d *damagedVolumes) get(id string) (damage, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	found, ok := d.m[id]
	return found, ok
}

func (d *damagedVolumes) put(id string, found damage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.m == nil {
		d.m = map[string]damage{}
	}
	d.m[id] = found
}

func (d *damagedVolumes) forget(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.m, id)
}

// check checks a file system that asks for it, before it is used. If only a person can repair it,
// check returns an error and has written nothing.
func (d *Driver) check(ctx context.Context, v volume.Volume, dev mounter.Device, found superblock.Result) error {
	fingerprint, err := superblock.Fingerprint(dev.Path)
	if err != nil {
		return volume.OfDevice(v.ID, err)
	}
	if known, ok := d.damaged.get(v.ID); ok && known.fingerprint == fingerprint {
		return needsPerson(v.ID, dev, found, known)
	}
	outcome, said, err := d.Programs.Check(ctx, dev.Path, found.Type)
	if err != nil {
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	if outcome != fsprogs.NeedsHuman {
		now, err := superblock.ProbeDevice(dev.Path)
		if err != nil {
			return volume.OfDevice(v.ID, err)
		}
		if now.NeedsCheck != "" {
			// The kernel refuses to mount an xfs with this mark.
			outcome, said = fsprogs.NeedsHuman, "nothing to repair was found, but the mark is still there. "+said
		}
	}
	d.Metrics.FilesystemChecked(outcome.String())
	d.audit(ctx, audit.Event{Action: audit.Checked, Volume: v.ID, Device: dev.Path, FSType: found.Type, Result: outcome.String()}, nil)
	d.Log.WarnContext(ctx, "file system check", "volume_id", v.ID, "device", dev.Path, "because", found.NeedsCheck, "outcome",
		outcome.String(), "output", said)
	if outcome != fsprogs.NeedsHuman {
		return nil
	}
	known := damage{fingerprint: fingerprint, said: said, when: time.Now()}
	d.damaged.put(v.ID, known)
	return needsPerson(v.ID, dev, found, known)
}

func needsPerson(id string, dev mounter.Device, found superblock.Result, known damage) error {
	return fault.New(fault.State, "volume %s: the %s on %s is damaged (%s) and needs a person: while it is not in use, look at it with "+
		"`%s`, or restore a snapshot. "+
		"Nothing was written to it. The check ran at %s, and runs again when its superblock has changed, or after an unstage. It said: %s",
		id, found.Type, dev.Path, found.NeedsCheck, fsprogs.CheckCommand(dev.Path, found.Type),
		known.when.UTC().Format(time.RFC3339), known.said)
}
