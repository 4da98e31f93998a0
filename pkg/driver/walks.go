package driver

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

// walk is a walk over a volume's files, for a pod's fsGroup.
type walk struct {
	volume, name string // its id, and what the orchestrator calls it
	pod, podUID  string // if the kubelet passes them
	since, ended time.Time
	progress     func() string // with the remaining time
	result       func() string // without
	failed       bool
}

// walks are the running ones, at most one of a volume, and the results of those that ended.
type walks struct {
	mu      sync.Mutex
	running map[string]*walk
	over    []*walk // the oldest first
}

const (
	// walkIsKept is how long a result is kept: csi-steward looks once a minute.
	walkIsKept = 10 * time.Minute
	mostWalks  = 1000 // of ended ones
)

// begin records a walk. The caller calls end when it has ended.
func (w *walks) begin(now *walk) (end func(error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running == nil {
		w.running = map[string]*walk{}
	}
	w.running[now.volume] = now
	return func(err error) {
		last := now.result()
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.running, now.volume)
		now.ended, now.failed, now.progress = time.Now(), err != nil, func() string { return last }
		w.forget(now.ended)
		if w.over = append(w.over, now); len(w.over) > mostWalks {
			w.over = slices.Delete(w.over, 0, 1)
		}
	}
}

// forget drops results older than walkIsKept. The caller holds mu.
func (w *walks) forget(now time.Time) {
	w.over = slices.DeleteFunc(w.over, func(o *walk) bool { return now.Sub(o.ended) > walkIsKept })
}

// Walks returns, by volume, when the running walks for a pod's fsGroup began.
func (d *Driver) Walks() map[string]time.Time {
	d.walks.mu.Lock()
	defer d.walks.mu.Unlock()
	since := map[string]time.Time{}
	for id, w := range d.walks.running {
		since[id] = w.since
	}
	return since
}

// describe returns the running and recently ended walks, the oldest first.
func (w *walks) describe() []*inventory.Walk {
	w.mu.Lock()
	w.forget(time.Now())
	all := slices.Clone(w.over)
	for _, r := range w.running {
		all = append(all, r)
	}
	var out []*inventory.Walk
	for _, one := range all {
		d := &inventory.Walk{Volume: one.volume, Name: one.name, Pod: one.pod, PodUid: one.podUID,
			Since: timestamppb.New(one.since), Progress: one.progress(), Failed: one.failed}
		if !one.ended.IsZero() {
			d.Ended = timestamppb.New(one.ended)
		}
		out = append(out, d)
	}
	w.mu.Unlock()
	slices.SortFunc(out, func(a, b *inventory.Walk) int {
		return cmp.Or(a.GetSince().AsTime().Compare(b.GetSince().AsTime()), cmp.Compare(a.GetVolume(), b.GetVolume()))
	})
	return out
}
