package driver

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

// walk is one over the files of a volume, for a pod's fsGroup.
type walk struct {
	volume, name string // its id, and what the orchestrator calls it
	pod, podUID  string // as far as the kubelet tells
	since, ended time.Time
	progress     func() string // with how long it will take
	result       func() string // without
	failed       bool
}

// walks are those that run, by volume, for there is one of a volume at a time; and what
// became of those that ended.
type walks struct {
	mu      sync.Mutex
	running map[string]*walk
	over    []*walk // the latest last
}

const (
	// walkIsKept is how long it is told what became of a walk: csi-steward looks once a minute.
	walkIsKept = 10 * time.Minute
	mostWalks  = 1000 // that have ended
)

// begin notes a walk; what it gives is called when it has ended.
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

// forget drops what ended long ago. The caller holds mu.
func (w *walks) forget(now time.Time) {
	w.over = slices.DeleteFunc(w.over, func(o *walk) bool { return now.Sub(o.ended) > walkIsKept })
}

// Walks tells, by volume, when the walks over files for a pod's fsGroup began that run now.
func (d *Driver) Walks() map[string]time.Time {
	d.walks.mu.Lock()
	defer d.walks.mu.Unlock()
	since := map[string]time.Time{}
	for id, w := range d.walks.running {
		since[id] = w.since
	}
	return since
}

// describe gives the walks that run and those that ended lately, the oldest first.
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
