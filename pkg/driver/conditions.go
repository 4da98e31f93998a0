package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Unhealthy is a problem of a volume that is staged here, or that lost writes when it was unstaged.
type Unhealthy struct {
	VolumeID, Reason string
	Status           string // degraded, inaccessible, data_loss
}

// GrowthWaiting is an enlarged volume whose file system or device is not larger yet.
type GrowthWaiting struct {
	VolumeID string
	Reason   string // file_system, no_room
}

// notOfTheVolume lists the health reasons that the metrics omit: pools have their own metrics, and
// the others are no faults.
var notOfTheVolume = []string{"PoolFull", "PoolNearlyFull", "PoolIsAway", "PoolUnreadable", "DeferredToRuntime", "ReadOnlyNotRecursive"}

const (
	lookTimeout  = 5 * time.Second // of one volume
	looksAtOnce  = 16
	doesNotReply = "DoesNotAnswer"
)

// condition is the result of one look.
type condition struct {
	unhealthy []Unhealthy
	grows     bool // its file system is smaller than its device
}

// conditions are the last results, by staged volume.
type conditions struct {
	mu   sync.Mutex
	last map[string]condition
}

// Conditions looks at the volumes that are staged here, in parallel. It reports their problems and
// whose growth waits. It abandons a look after lookTimeout, and does not look again until the
// volume answers.
func (d *Driver) Conditions() (unhealthy []Unhealthy, waiting []GrowthWaiting) {
	d.conditions.mu.Lock()
	before := d.conditions.last
	d.conditions.mu.Unlock()
	staged := d.staged.all()
	ids := slices.Sorted(maps.Keys(staged))
	found := make([]condition, len(ids))
	var looks errgroup.Group
	looks.SetLimit(looksAtOnce)
	for i, id := range ids {
		looks.Go(func() error {
			found[i] = d.condition(staged[id], before[id])
			return nil
		})
	}
	_ = looks.Wait() // none returns an error
	now := map[string]condition{}
	for i, id := range ids {
		now[id] = found[i]
		unhealthy = append(unhealthy, found[i].unhealthy...)
		if found[i].grows {
			waiting = append(waiting, GrowthWaiting{id, "file_system"})
		}
	}
	for _, id := range d.lost.all() { // staged or not, looked at or not
		if u := (Unhealthy{id, writesLost, "data_loss"}); !slices.Contains(unhealthy, u) {
			unhealthy = append(unhealthy, u)
		}
	}
	d.conditions.mu.Lock()
	d.conditions.last = now
	d.conditions.mu.Unlock()
	for _, id := range d.refused.all() {
		waiting = append(waiting, GrowthWaiting{id, "no_room"})
	}
	return unhealthy, waiting
}

// condition looks at a volume. If the volume does not answer, its growth is as before.
func (d *Driver) condition(r stagedRecord, before condition) condition {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	var c condition
	err := d.readers.look(ctx, ofVolume(r.VolumeID), func() error {
		src, v, err := d.Volumes.Find(r.VolumeID)
		if err != nil {
			return err // it was unstaged meanwhile, or the pool is away
		}
		c = condition{unhealthy: ailing(d.health(ctx, src, r.VolumeID, "", false)), grows: d.grows(r, v)}
		return nil
	})
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, errNoAnswer):
		return condition{unhealthy: []Unhealthy{{r.VolumeID, doesNotReply, "inaccessible"}}, grows: before.grows}
	case errors.Is(err, errTakenAway): // the last look may have timed out; this error says why
		before.unhealthy = slices.DeleteFunc(slices.Clone(before.unhealthy), func(u Unhealthy) bool { return u.Reason == doesNotReply })
		return before
	case fault.Is(err, fault.Busy): // another look has not returned yet
		return before
	case fault.Is(err, fault.NotFound) && d.orphan(r.VolumeID) != nil:
		return condition{unhealthy: []Unhealthy{{r.VolumeID, orphaned, "degraded"}}}
	case err != nil:
		return condition{}
	}
	return c
}

const orphaned = "PoolNotConfigured" // the reason in a volume's health

// orphan returns what is wrong with a volume that is staged here but whose pool is no longer
// configured; nil for any other. Such a pool has no metrics, so the volume's have it.
func (d *Driver) orphan(id string) []mounter.Ailment {
	_, _, _, made := volume.ParseID(id)
	_, known := d.Volumes.OwnerOf(id)
	if _, staged := d.staged.get(id); !staged || !made || known {
		return nil
	}
	return []mounter.Ailment{{Reason: orphaned, Message: fmt.Sprintf(
		"%v. Pods that have the volume go on, and it can be unpublished and unstaged; nothing else can be done with it",
		d.Volumes.CheckPool(id))}}
}

// ailing returns what the metrics show of a volume's health.
func ailing(r *csi.NodeGetVolumeHealthResponse) []Unhealthy {
	var found []Unhealthy
	for _, h := range r.GetVolumeHealth().GetHealthStatuses() {
		status := ""
		switch h.GetStatus() {
		case csi.VolumeHealthErrorType_DEGRADED:
			status = "degraded"
		case csi.VolumeHealthErrorType_INACCESSIBLE:
			status = "inaccessible"
		case csi.VolumeHealthErrorType_DATA_LOSS:
			status = "data_loss"
		}
		if status != "" && !slices.Contains(notOfTheVolume, h.GetReason()) {
			found = append(found, Unhealthy{r.GetVolumeHealth().GetVolumeId(), h.GetReason(), status})
		}
	}
	return found
}

// grows tells whether the growth of a volume's file system waits, on this node.
func (d *Driver) grows(r stagedRecord, v volume.Volume) bool {
	if r.Block || r.Share != "" || len(d.deferrals.of(v.ID)) > 0 {
		return false // there is no file system, or somebody else grows it
	}
	return v.Facts.GrowDue && (!v.Facts.GivenToGuest || r.HostMayMount)
}

// refusedGrowth are the volumes that their pool had no room to enlarge. A restart forgets them:
// nothing relies on them, and a repeated request is refused again.
type refusedGrowth struct {
	mu sync.Mutex
	m  map[string]bool
}

// note records how an attempt to enlarge a volume ended.
func (g *refusedGrowth) note(id string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil:
		delete(g.m, id)
	case fault.Is(err, fault.NoSpace):
		if g.m == nil {
			g.m = map[string]bool{}
		}
		g.m[id] = true
	}
}

func (g *refusedGrowth) all() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Sorted(maps.Keys(g.m))
}
