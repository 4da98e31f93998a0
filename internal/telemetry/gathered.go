package telemetry

import (
	"sync"
	"time"
)

const (
	// patience is how long callers wait for a look.
	patience = 2 * time.Second
	// lost is how long a look may hang before its last result is worthless.
	lost = 30 * time.Second
)

// gathered caches the result of a look at something that may hang, such as a disk. The look runs in
// the background, one at a time, so that no more than one can hang.
type gathered[T any] struct {
	look  func() T
	again time.Duration // maximum age of a result before another look

	mu       sync.Mutex
	last     T
	known    bool          // there is a result
	begun    time.Time     // start of the last look
	finished time.Time     // when the last result arrived
	running  chan struct{} // closed when the running look ends; nil: none runs
}

// latest returns the result of a new look, or the last result if the look takes longer than
// patience. ok is false if there is no result yet, or if the look seems to hang.
func (g *gathered[T]) latest() (last T, ok bool) {
	g.mu.Lock()
	if g.running == nil && (!g.known || time.Since(g.finished) >= g.again) {
		g.running, g.begun = make(chan struct{}), time.Now()
		go g.run()
	}
	running, left := g.running, patience-time.Since(g.begun)
	g.mu.Unlock()
	if running != nil && left > 0 {
		select {
		case <-running:
		case <-time.After(left):
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last, g.known && (g.running == nil || time.Since(g.begun) < lost)
}

func (g *gathered[T]) run() {
	last := g.look()
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.running)
	g.last, g.known, g.finished, g.running = last, true, time.Now(), nil
}
