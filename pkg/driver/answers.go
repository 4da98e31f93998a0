package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// A pool's disk may hang for ever. A caller gets its answer by its deadline, and after lookTimeout
// at the latest. A read that hangs is abandoned, and no other of that pool begins meanwhile.

// answerLasts is how long a pool's answer counts.
const answerLasts = time.Second

// askPool returns what f reads of a pool's disk. After lookTimeout it abandons f. Until f returns
// no other question begins, so that a hanging disk blocks few threads. A caller that leaves early
// proves nothing.
func askPool[T any](ctx context.Context, d *Driver, p volume.Pool, f func() (T, error)) (answer T, err error) {
	return ask(ctx, d, subject{aPool, p.Name()}, f)
}

// askSizes is askPool for counting. That may take longer than any call waits and says nothing of
// the disk, so other calls of the pool go on.
func askSizes[T any](ctx context.Context, d *Driver, p volume.Pool, f func() (T, error)) (answer T, err error) {
	if _, err := askPool(ctx, d, p, func() (struct{}, error) { return struct{}{}, nil }); err != nil {
		return answer, err
	}
	return ask(ctx, d, subject{sizesOfPool, p.Name()}, f)
}

func ask[T any](ctx context.Context, d *Driver, of subject, f func() (T, error)) (answer T, err error) {
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	var got T
	done := make(chan error, 1)
	go func() {
		defer cancel()
		done <- d.readers.look(look, of, func() (err error) {
			got, err = f()
			return err
		})
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		return answer, fmt.Errorf("pool %s has not answered yet: %w", of.name, ctx.Err())
	}
	if errors.Is(err, context.DeadlineExceeded) {
		if of.kind == sizesOfPool {
			return answer, fault.New(fault.Unavailable, "%s %w, for more than %s", of, errCounting, lookTimeout)
		}
		return answer, fault.New(fault.Unavailable, "%s has not answered within %s, so its disk or server %w: see the kernel's log (dmesg)",
			of, lookTimeout, errNoAnswer)
	}
	if err != nil {
		return answer, err // f may still be writing to got
	}
	return got, nil
}

// answered records when each pool was last asked something that it answered.
type answered struct {
	mu sync.Mutex
	m  map[string]time.Time // by name
}

func (a *answered) lately(pool string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return time.Since(a.m[pool]) < answerLasts
}

func (a *answered) note(pool string, asked time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.m == nil {
		a.m = map[string]time.Time{}
	}
	if asked.After(a.m[pool]) {
		a.m[pool] = asked
	}
}

// answers returns nil once a pool's disk has taken a write, now or within answerLasts. Otherwise
// its error says that the disk does not answer. Other errors surface when the disk is used.
func (d *Driver) answers(ctx context.Context, p volume.Pool) error {
	disk, ok := p.(volume.Answerer)
	if !ok || d.answered.lately(p.Name()) {
		return nil
	}
	asked := time.Now()
	_, err := askPool(ctx, d, p, func() (struct{}, error) { return struct{}{}, disk.Answers() })
	if errors.Is(err, errNoAnswer) || ctx.Err() != nil {
		return err
	}
	d.answered.note(p.Name(), asked)
	return nil
}

// inPool is operations.long for work that changes a pool. The pool must answer first. The error
// names the pool if the caller's time is up.
func (d *Driver) inPool(
	ctx context.Context, what string, p volume.Pool, f func(context.Context, *volume.Progress) error, keys ...string,
) error {
	err := d.ops.long(ctx, what, func(ctx context.Context, progress *volume.Progress) error {
		if err := d.answers(ctx, p); err != nil {
			return err
		}
		return f(ctx, progress)
	}, keys...)
	if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return fmt.Errorf("pool %s: %w", p.Name(), err)
	}
	return err
}

// usable returns why a pool cannot be used.
func (d *Driver) usable(ctx context.Context, p volume.Pool) error {
	_, err := askPool(ctx, d, p, func() (struct{}, error) { return struct{}{}, p.Usable() })
	return err
}

// isHere returns CheckPool's error, or that the pool does not answer.
func (d *Driver) isHere(ctx context.Context, id string) error {
	p, ok := d.Volumes.OwnerOf(id)
	if !ok {
		return d.Volumes.CheckPool(id)
	}
	_, err := askPool(ctx, d, p, func() (struct{}, error) { return struct{}{}, d.Volumes.CheckPool(id) })
	return err
}

// found looks up a volume.
func (d *Driver) found(ctx context.Context, id string) (volume.Volume, error) {
	find := func() (volume.Volume, error) {
		_, v, err := d.Volumes.Find(id)
		return v, err
	}
	if p, ok := d.Volumes.OwnerOf(id); ok {
		return askPool(ctx, d, p, find)
	}
	return find()
}
