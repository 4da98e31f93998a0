package poolhome

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// hangAfter is the time after which a small write counts as hanging. It equals the time that
// calls wait.
const hangAfter = 5 * time.Second

// asked holds the start times of unfinished writes, oldest first.
type asked struct {
	mu    sync.Mutex
	since []time.Time
}

// Answers returns after the pool's disk has taken a write. It may hang. For a pool that was
// never available, it returns nil.
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

// Hangs returns an error if a call of Answers has been hanging. It does not wait.
func (p *Pool) Hangs() error {
	p.asked.mu.Lock()
	defer p.asked.mu.Unlock()
	if all := p.asked.since; len(all) > 0 && time.Since(all[0]) > hangAfter {
		return fmt.Errorf("pool %s has not answered since %s", p.o.Name, all[0].UTC().Format(time.RFC3339))
	}
	return nil
}
