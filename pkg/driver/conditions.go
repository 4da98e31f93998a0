package driver

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Unhealthy is something that is wrong with a volume that is staged here.
type Unhealthy struct {
	VolumeID, Reason string
	Status           string // degraded, inaccessible, data_loss
}

// GrowthWaiting is a volume that somebody enlarged, and whose file system or device is
// not larger yet.
type GrowthWaiting struct {
	VolumeID string
	Reason   string // file_system, no_room
}

// Walk is a walk over a volume's files, for the pod's fsGroup, that runs now.
type Walk struct {
	VolumeID string
	Since    time.Time
}

// notOfTheVolume are the reasons of health that the metrics leave out: a pool has metrics
// of its own, and the others are no faults.
var notOfTheVolume = []string{"PoolFull", "PoolNearlyFull", "PoolIsAway", "PoolUnreadable", "DeferredToRuntime", "ReadOnlyNotRecursive"}

const (
	lookAgain    = 10 * time.Second // a scrape within this time gets the last result
	lookPatience = 2 * time.Second  // a scrape of the metrics waits for no sick disk
	lookTimeout  = 5 * time.Second  // of one volume
)

// conditions is what the last look at all staged volumes found.
type conditions struct {
	mu      sync.Mutex
	found   []Unhealthy
	ended   time.Time
	running chan struct{} // closed when the look that runs has ended; nil: none runs
}

// latest gives what look finds, or found the last time: no two looks run at once, there
// is one in lookAgain at most, and it is waited for only as long as lookPatience.
func (c *conditions) latest(look func() []Unhealthy) []Unhealthy {
	c.mu.Lock()
	if c.running == nil && time.Since(c.ended) >= lookAgain {
		c.running = make(chan struct{})
		go c.look(look)
	}
	running := c.running
	c.mu.Unlock()
	if running != nil {
		select {
		case <-running:
		case <-time.After(lookPatience):
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.found)
}

func (c *conditions) look(look func() []Unhealthy) {
	found := look()
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.running)
	c.found, c.ended, c.running = found, time.Now(), nil
}

// Unhealthy looks at the volumes that are staged here, and tells what is wrong with
// them. The next scrape reports what took too long for this one.
func (d *Driver) Unhealthy() []Unhealthy {
	return d.conditions.latest(func() []Unhealthy {
		var found []Unhealthy
		for id := range d.staged.all() {
			found = append(found, d.unhealthy(id)...)
		}
		return found
	})
}

func (d *Driver) unhealthy(id string) []Unhealthy {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	r, err := d.healthOf(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id}, false)
	if errors.Is(err, context.DeadlineExceeded) {
		return []Unhealthy{{id, "DoesNotAnswer", "inaccessible"}}
	}
	if err != nil {
		return nil // it was unstaged meanwhile, or the pool is away
	}
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
			found = append(found, Unhealthy{id, h.GetReason(), status})
		}
	}
	return found
}

// GrowthWaiting gives the volumes whose growth waits, on this node.
func (d *Driver) GrowthWaiting() []GrowthWaiting {
	var waiting []GrowthWaiting
	for id, r := range d.staged.all() {
		if r.Block || r.Share != "" || len(d.deferrals.of(id)) > 0 {
			continue // there is no file system, or it is somebody else's to grow
		}
		if _, v, err := d.Volumes.Find(id); err == nil && v.Facts.GrowDue && (!v.Facts.GivenToGuest || r.HostMayMount) {
			waiting = append(waiting, GrowthWaiting{id, "file_system"})
		}
	}
	for _, id := range d.refused.all() {
		waiting = append(waiting, GrowthWaiting{id, "no_room"})
	}
	return waiting
}

// Walks gives the walks that run.
func (d *Driver) Walks() []Walk { return d.walks.all() }

// refusedGrowth are the volumes whose growth the pool had no room for. A restart
// forgets them: nothing relies on it, and whoever asks again is refused again.
type refusedGrowth struct {
	mu sync.Mutex
	m  map[string]bool
}

// note keeps how an attempt to enlarge a volume ended.
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

// runningWalks are the walks that run, by volume: there is one of a volume at a time.
type runningWalks struct {
	mu sync.Mutex
	m  map[string]time.Time
}

// begin notes a walk; what it gives is called when it has ended.
func (w *runningWalks) begin(id string, since time.Time) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.m == nil {
		w.m = map[string]time.Time{}
	}
	w.m[id] = since
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.m, id)
	}
}

func (w *runningWalks) all() []Walk {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []Walk
	for id, since := range w.m {
		all = append(all, Walk{id, since})
	}
	return all
}
