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

// readers are the calls that only look at a volume and take no lock. What they have open meanwhile
// would keep the volume from being unmounted.
type readers struct {
	log *slog.Logger

	mu sync.Mutex
	m  map[subject]*gate
}

// subject is what is looked at: a volume, a pool, or the sizes of a pool.
type subject struct{ kind, name string }

// Kinds of subjects with many callers, whose looks always get their full time.
const aPool, sizesOfPool, aFormerPool = "pool", "the sizes of pool", "the former pool"

func (s subject) shared() bool {
	return s.kind == aPool || s.kind == sizesOfPool || s.kind == aFormerPool
}

func (s subject) String() string { return s.kind + " " + s.name }

func ofVolume(id string) subject { return subject{"volume", id} }

// gate guards one subject.
type gate struct {
	inside  int           // calls that look at it
	shut    int           // calls that take it away
	doing   string        // what the first of these does: "being unpublished"
	shutAt  time.Time     // when it began
	hung    int           // looks that outlived their callers
	since   time.Time     // when the first did
	began   time.Time     // its begin
	writing int           // looks that write it out
	wroteAt time.Time     // when the first of these began
	changed chan struct{} // closed and replaced at each change
}

func newReaders(log *slog.Logger) *readers { return &readers{log: log, m: map[subject]*gate{}} }

// errNoAnswer says that a look hangs.
var errNoAnswer = errors.New("does not answer")

// errCounting says that a pool's sizes are unknown for now: counting many shared extents takes
// long.
var errCounting = errors.New("are being counted")

// errTakenAway says why there is no look: somebody takes the volume away on purpose, and writing it
// out may take minutes.
var errTakenAway = errors.New("nobody looks at it for now")

// errWriting says why there is no look: an earlier one writes the volume out, for an unknown time.
var errWriting = errors.New("is being written out")

// shutPatience bounds the wait while a volume is taken away, which usually takes milliseconds. It
// is shorter than any look's timeout, so that the volume does not seem to hang.
const shutPatience = 2 * time.Second

// at returns the gate of a subject. The caller holds mu.
func (r *readers) at(of subject) *gate {
	g, ok := r.m[of]
	if !ok {
		g = &gate{changed: make(chan struct{})}
		r.m[of] = g
	}
	return g
}

// change applies f, wakes those that wait, and drops an unused gate.
func (r *readers) change(of subject, f func(*gate)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.at(of)
	f(g)
	close(g.changed)
	g.changed = make(chan struct{})
	if g.inside == 0 && g.shut == 0 && g.hung == 0 && g.writing == 0 {
		delete(r.m, of)
	}
}

// enter waits while the volume is being taken away, for shutPatience, or until ctx ends. The caller
// calls leave when it has nothing of the volume open any more.
func (r *readers) enter(ctx context.Context, of subject) (leave func(), err error) {
	var patience <-chan time.Time
	for {
		r.mu.Lock()
		g := r.at(of)
		if g.hung > 0 {
			since := time.Since(g.since)
			began, writing, wroteAt := g.began, g.writing > 0, g.wroteAt
			r.mu.Unlock()
			if writing {
				return nil, fault.New(fault.Busy, "%s %w since %s. If that does not end, see the kernel's log (dmesg)",
					of, errWriting, wroteAt.UTC().Format(time.RFC3339))
			}
			if of.kind == sizesOfPool {
				return nil, fault.New(fault.Unavailable, "%s %w, since %s", of, errCounting, began.UTC().Format(time.RFC3339))
			}
			if of.shared() { // its looks get their full time
				return nil, fault.New(fault.Unavailable,
					"%s has not answered since %s, so its disk or server %w: see the kernel's log (dmesg)",
					of, began.UTC().Format(time.RFC3339), errNoAnswer)
			}
			left := fmt.Sprintf("%s: a look at it has not come back since its caller left %s ago", of, since.Round(time.Second))
			if since <= readerPatience { // its caller may have left early
				return nil, fault.New(fault.Busy, "%s; try again", left)
			}
			return nil, fault.New(fault.Busy, "%s; its disk or server %w: see the kernel's log (dmesg)", left, errNoAnswer)
		}
		full := of.shared() && g.inside >= looksAtOnce // they may hang, each with a thread
		if g.shut == 0 && !full {
			g.inside++
			r.mu.Unlock()
			return func() { r.change(of, func(g *gate) { g.inside-- }) }, nil
		}
		changed, doing, shutAt := g.changed, g.doing, g.shutAt
		r.mu.Unlock()
		if patience == nil && !full {
			timer := time.NewTimer(shutPatience)
			defer timer.Stop()
			patience = timer.C
		}
		select {
		case <-changed:
		case <-patience:
			return nil, fault.New(fault.Busy, "%s: %w: since %s it is %s. If that does not end, see the kernel's log (dmesg)",
				of, errTakenAway, shutAt.UTC().Format(time.RFC3339), doing)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// writing marks that a look writes the volume out, until done is called. The time that takes says
// nothing of the disk.
func (r *readers) writing(of subject) (done func()) {
	r.change(of, func(g *gate) {
		if g.writing++; g.writing == 1 {
			g.wroteAt = time.Now()
		}
	})
	return func() { r.change(of, func(g *gate) { g.writing-- }) }
}

// look runs f, which looks at the volume, and returns when ctx ends: f hangs for as long as the
// disk or server does. Until it returns no other look begins, because each blocks a thread.
func (r *readers) look(ctx context.Context, of subject, f func() error) error {
	leave, err := r.enter(ctx, of)
	if err != nil {
		return err
	}
	began, done, back := time.Now(), make(chan error, 1), make(chan struct{})
	go func() {
		defer close(back)
		err := r.recovered(of, f)
		leave()
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		r.change(of, func(g *gate) {
			if g.hung++; g.hung == 1 {
				g.since, g.began = time.Now(), began
			}
		})
		go func() {
			<-back
			r.change(of, func(g *gate) { g.hung-- })
		}()
		return ctx.Err()
	}
}

func (r *readers) recovered(of subject, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			r.log.Error("panic", of.kind, of.name, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: panic: %v", of, p)
		}
	}()
	return f()
}

// readerPatience bounds the wait for those that look. One that hangs on a dead server is abandoned.
const readerPatience = 5 * time.Second

// exclude waits until nobody looks at the volume, up to readerPatience. It keeps others out until
// done is called. doing says what happens meanwhile: "being unpublished".
func (r *readers) exclude(id, doing string) (done func()) {
	timeout := time.NewTimer(readerPatience)
	defer timeout.Stop()
	of := ofVolume(id)
	r.mu.Lock()
	if g := r.at(of); g.shut == 0 {
		g.doing, g.shutAt = doing, time.Now()
	}
	r.at(of).shut++
	r.mu.Unlock()
	done = func() { r.change(of, func(g *gate) { g.shut-- }) }
	for {
		r.mu.Lock()
		g := r.at(of)
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
