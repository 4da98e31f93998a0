package poolhome

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// hangAfter is how long a small write may take before the pool is said to hang. It is as
// long as calls wait.
const hangAfter = 5 * time.Second

// asked is when writes began that are not back yet; the oldest first.
type asked struct {
	mu    sync.Mutex
	since []time.Time
}

// Answers returns when the pool's disk has taken a write. It may hang. A pool that was never there has no disk to ask.
func (p *Pool) Answers() error {
	disk, ok := p.known().(volume.Answerer)
	if !ok {
		return nil
	}
	began := time.Now()
	p.asked.mu.Lock()
	p.asked.since = append(p.asked.since, began)
	p.asked.mu.Unlock()
	err := disk.Answers()
	p.asked.mu.Lock()
	defer p.asked.mu.Unlock()
	at := slices.Index(p.asked.since, began)
	p.asked.since = slices.Delete(p.asked.since, at, at+1)
	return err
}

// Hangs tells of a pool whose disk was asked by Answers and has not answered. It waits for nothing.
func (p *Pool) Hangs() error {
	p.asked.mu.Lock()
	defer p.asked.mu.Unlock()
	if all := p.asked.since; len(all) > 0 && time.Since(all[0]) > hangAfter {
		return fmt.Errorf("pool %s has not answered since %s", p.o.Name, all[0].UTC().Format(time.RFC3339))
	}
	return nil
}
