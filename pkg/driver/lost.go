package driver

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// lostWrites remembers which volumes lost writes, and how. The kernel reports a loss once, and room
// in a full pool repairs nothing. A note stays until the volume is staged anew or deleted. It is in
// memory only; the audit log keeps the loss.
type lostWrites struct {
	mu sync.Mutex
	m  map[string]string // the error, by volume
}

const writesLost = "WritesLost" // the reason in a volume's health

// note records a loss. It returns whether it is the volume's first known one.
func (l *lostWrites) note(id string, err error) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m == nil {
		l.m = map[string]string{}
	}
	first = l.m[id] == ""
	l.m[id] = err.Error()
	return first
}

func (l *lostWrites) forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, id)
}

// all returns the volumes that lost writes.
func (l *lostWrites) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.m))
}

func (l *lostWrites) of(id string) []mounter.Ailment {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m[id] == "" {
		return nil
	}
	return []mounter.Ailment{{
		Reason: writesLost, Fatal: true, Lost: true,
		Message: "writes to the volume's device failed, and what was written is lost: " + l.m[id] +
			"; make room in the pool, stop the pods, check the data; this is shown until the volume is staged anew or deleted, or " +
			"csi-node restarts, and in `crustctl history` until its log rotates",
	}}
}

// noteLost records a loss where operators look for it: in the volume's health, the metrics and the
// audit log. It ignores other errors: a failed query is no loss.
func (d *Driver) noteLost(ctx context.Context, id string, err error) {
	if !errors.Is(err, volume.ErrWritesLost) && !errors.Is(err, mounter.ErrNotWritten) {
		return
	}
	if d.lost.note(id, err) {
		d.audit(ctx, audit.Event{Action: audit.WritesLost, Volume: id}, nil)
	}
}

// crowded tells whether the pool was found (nearly) full: then writes to thin volumes fail, and a
// flush is worth its time.
func crowded(found []mounter.Ailment) bool {
	for _, a := range found {
		if a.Reason == "PoolFull" || a.Reason == "PoolNearlyFull" {
			return true
		}
	}
	return false
}
