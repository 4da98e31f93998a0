package driver

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// operations are the running calls. A second call on the same volume is refused (ABORTED) and never
// waits. Calls on different volumes never meet.
type operations struct {
	mu      sync.Mutex
	running map[string]*operation
	work    chan func()
	workers atomic.Int32
	done    sync.WaitGroup
	stop    context.Context
	cancel  context.CancelCauseFunc
	log     *slog.Logger
}

type operation struct {
	what     string
	since    time.Time
	progress volume.Progress
}

func newOperations(log *slog.Logger) *operations {
	stop, cancel := context.WithCancelCause(context.Background())
	return &operations{running: map[string]*operation{}, work: make(chan func()), stop: stop, cancel: cancel, log: log}
}

// idleWorkers is the most goroutines that wait for work. A new one grows its stack during each
// publish, which takes ten times as long as handing work to one that has.
const idleWorkers = 16

// start runs f in another goroutine.
func (o *operations) start(f func()) {
	select {
	case o.work <- f:
		return
	default:
	}
	o.done.Go(func() {
		f()
		defer o.workers.Add(-1)
		if o.workers.Add(1) > idleWorkers {
			return
		}
		for {
			select {
			case f := <-o.work:
				f()
			case <-o.stop.Done():
				return
			}
		}
	})
}

// begin takes all keys or none.
func (o *operations) begin(what string, keys []string) (*operation, func(), error) {
	op := &operation{what: what, since: time.Now()}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, k := range keys {
		if other, ok := o.running[k]; ok {
			return nil, nil, fault.New(fault.Busy, "%s: %s is running since %s%s; try again", k, other.what,
				time.Since(other.since).Round(time.Millisecond), other.soFar())
		}
	}
	for _, k := range keys {
		o.running[k] = op
	}
	return op, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, k := range keys {
			delete(o.running, k)
		}
	}, nil
}

func (op *operation) soFar() string {
	if s := op.progress.String(); s != "" {
		return " (" + s + ")"
	}
	return ""
}

// short runs f while holding the keys.
func (o *operations) short(what string, f func() error, keys ...string) error {
	_, end, err := o.begin(what, keys)
	if err != nil {
		return err
	}
	defer end()
	return f()
}

// long runs f while holding the keys. When the caller's time is up, long returns and f goes on: a
// repeated call finds it running, or its result.
func (o *operations) long(ctx context.Context, what string, f func(context.Context, *volume.Progress) error, keys ...string) error {
	op, end, err := o.begin(what, keys)
	if err != nil {
		return err
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	unhook := context.AfterFunc(o.stop, func() { cancel(context.Cause(o.stop)) })
	result := make(chan error, 1)
	o.start(func() {
		var err error
		// Free the keys before the answer is out: the caller's next call on the volume must not
		// find them taken.
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%s: panic: %v", what, p)
				o.log.ErrorContext(run, "panic", "what", what, "on", keys, "panic", p, "stack", string(debug.Stack()))
			}
			end()
			unhook()
			cancel(nil)
			result <- err
		}()
		err = f(run, &op.progress)
		if ctx.Err() != nil {
			o.log.InfoContext(run, "an operation whose caller had left has ended", "what", what, "on", keys,
				"took", time.Since(op.since), "error", err)
		}
	})
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s goes on%s; repeat the call to learn the outcome: %w", what, op.soFar(), ctx.Err())
	}
}

// drain cancels what goes on without a caller.
func (o *operations) drain(ctx context.Context) {
	o.cancel(fmt.Errorf("the driver is stopping"))
	finished := make(chan struct{})
	go func() { o.done.Wait(); close(finished) }()
	select {
	case <-finished:
	case <-ctx.Done():
	}
}
