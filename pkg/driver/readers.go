package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// readers are the calls that only look at a volume and take no lock: what they
// have open while they look would keep the volume from being unmounted.
type readers struct {
	log *slog.Logger

	mu sync.Mutex
	m  map[string]*gate
}

// gate is one volume's.
type gate struct {
	inside  int           // calls that look at it
	shut    int           // calls that take it away
	hung    int           // looks that have outlived their callers
	since   time.Time     // the first of them did
	changed chan struct{} // closed, and another made, when one of them leaves
}

func newReaders(log *slog.Logger) *readers { return &readers{log: log, m: map[string]*gate{}} }

// errNoAnswer is why a look hangs.
var errNoAnswer = errors.New("does not answer")

// at gives the volume's gate. The caller holds mu.
func (r *readers) at(id string) *gate {
	g, ok := r.m[id]
	if !ok {
		g = &gate{changed: make(chan struct{})}
		r.m[id] = g
	}
	return g
}

// change applies f, tells those that wait, and forgets a gate that nobody needs.
func (r *readers) change(id string, f func(*gate)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.at(id)
	f(g)
	close(g.changed)
	g.changed = make(chan struct{})
	if g.inside == 0 && g.shut == 0 && g.hung == 0 {
		delete(r.m, id)
	}
}

// enter waits while the volume is being taken away, or until ctx ends. What it
// gives is called when nothing of the volume is open any more.
func (r *readers) enter(ctx context.Context, id string) (leave func(), err error) {
	for {
		r.mu.Lock()
		g := r.at(id)
		if g.hung > 0 {
			since := time.Since(g.since)
			r.mu.Unlock()
			left := fmt.Sprintf("volume %s: a look at it has not come back since its caller left %s ago", id, since.Round(time.Second))
			if since <= readerPatience { // it may have been its caller's haste
				return nil, fault.New(fault.Busy, "%s; try again", left)
			}
			return nil, fault.New(fault.Busy, "%s; its disk or server %w: see the kernel's log (dmesg)", left, errNoAnswer)
		}
		if g.shut == 0 {
			g.inside++
			r.mu.Unlock()
			return func() { r.change(id, func(g *gate) { g.inside-- }) }, nil
		}
		changed := g.changed
		r.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// look runs f, which looks at the volume, and leaves it when ctx ends: a look at a
// disk or server that does not answer comes back when it may. Until then there is
// no other, for each of them keeps a thread.
func (r *readers) look(ctx context.Context, id string, f func() error) error {
	leave, err := r.enter(ctx, id)
	if err != nil {
		return err
	}
	done, back := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(back)
		err := r.recovered(id, f)
		leave()
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		r.change(id, func(g *gate) {
			if g.hung++; g.hung == 1 {
				g.since = time.Now()
			}
		})
		go func() {
			<-back
			r.change(id, func(g *gate) { g.hung-- })
		}()
		return ctx.Err()
	}
}

func (r *readers) recovered(id string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			r.log.Error("panic", "volume_id", id, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("volume %s: panic: %v", id, p)
		}
	}()
	return f()
}

// readerPatience bounds the wait for those that look. One that hangs, on a server
// that is gone, is not waited for longer.
const readerPatience = 5 * time.Second

// exclude waits until nobody looks at the volume, and keeps others out until what
// it gives is called.
func (r *readers) exclude(id string) (done func()) {
	timeout := time.NewTimer(readerPatience)
	defer timeout.Stop()
	r.mu.Lock()
	r.at(id).shut++
	r.mu.Unlock()
	done = func() { r.change(id, func(g *gate) { g.shut-- }) }
	for {
		r.mu.Lock()
		g := r.at(id)
		inside, changed := g.inside, g.changed
		r.mu.Unlock()
		if inside == 0 {
			return done
		}
		select {
		case <-changed:
		case <-timeout.C:
			return done
		}
	}
}
