package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/tracing"
)

// publishTimeout bounds a publish in a sandbox, including retries; giving many files to a group
// takes long.
const publishTimeout = 10 * time.Minute

// podSandbox is a pod's running sandbox.
type podSandbox struct {
	id  string
	pid int64
}

// task is a publish in a sandbox, running or ended.
type task struct {
	sandbox string
	began   time.Time
	cancel  func()
	done    chan struct{}
	err     error // valid after done

	mu   sync.Mutex
	last error // of the last attempt
}

func finished(sandbox string, err error) *task {
	t := &task{sandbox: sandbox, cancel: func() {}, done: make(chan struct{}), err: err}
	close(t.done)
	return t
}

func (t *task) running() bool {
	select {
	case <-t.done:
		return false
	default:
		return true
	}
}

// failure returns the task's error, or its last attempt's.
func (t *task) failure() error {
	if !t.running() {
		return t.err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last
}

// start publishes the deferral at a target in a sandbox, in the background, unless that is running
// or done.
func (a *Agent) start(target string, b podSandbox) *task {
	a.mu.Lock()
	defer a.mu.Unlock()
	d, ok := a.Records.Get(target)
	if !ok || a.ending[target] || b.pid == 0 {
		return finished(b.id, fmt.Errorf("the volume at %s: %w", target, errEnded))
	}
	if d.in(b.id) {
		return finished(b.id, nil)
	}
	before := a.tasks[target]
	if before != nil && before.running() {
		if before.sandbox == b.id {
			return before
		}
		before.cancel() // for a sandbox that the pod no longer has
	}
	t := a.run(target, b, before, publishTimeout, func(ctx context.Context, t *task) error {
		// A child of the call that deferred the volume, not a link: the pod waits for both, and one
		// trace must show for what.
		ctx, end := tracing.Continue(ctx, a.Tracer, d.Trace, "publish in sandbox", aboutDeferral(d, b)...)
		pending, err := a.publish(ctx, target, b, t)
		end(err)
		if err == nil {
			a.Count("published")
		}
		if err == nil && !pending {
			a.tell(d.Pod, corev1.EventTypeNormal, EventPublished,
				fmt.Sprintf("volume %s (%s) is mounted in the pod's sandbox", d.Volume, d.Type), b.id)
		}
		return err
	})
	if before != nil && before.sandbox == b.id && time.Since(before.began) < patientAgain {
		t.began = before.began
	}
	return t
}

// aboutDeferral returns span attributes for a deferral.
func aboutDeferral(d Deferral, b podSandbox) []attribute.KeyValue {
	return append(tracing.Pod(d.Pod.Namespace, d.Pod.Name, d.Pod.UID), tracing.Volume(d.VolumeID), tracing.Sandbox(b.id))
}

// run starts a task, after the one before it. The caller holds a.mu.
func (a *Agent) run(target string, b podSandbox, before *task, limit time.Duration, f func(context.Context, *task) error) *task {
	ctx, cancel := context.WithTimeout(a.life, limit)
	t := &task{sandbox: b.id, began: time.Now(), cancel: cancel, done: make(chan struct{})}
	a.tasks[target] = t
	a.work.Go(func() {
		defer close(t.done)
		defer cancel()
		if before != nil {
			<-before.done
		}
		t.err = f(ctx, t)
	})
	return t
}

// refresh has the runtime check that a published volume is still there: one that lost it mounts it
// again, for a later attempt of the container.
func (a *Agent) refresh(target string, b podSandbox) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.tasks[target]
	if a.ending[target] || before != nil && before.running() {
		return
	}
	d, _ := a.Records.Get(target)
	const pause = 50 * time.Millisecond
	a.run(target, b, before, registerTimeout, func(ctx context.Context, _ *task) error {
		// A trace of its own: days may have passed.
		ctx, end := tracing.Continue(ctx, a.Tracer, "", "look after published volume", aboutDeferral(d, b)...)
		_, err := a.attempt(ctx, target, b)
		for status.Code(err) == codes.Aborted && ctx.Err() == nil { // busy with another volume of the pod
			time.Sleep(pause)
			_, err = a.attempt(ctx, target, b)
		}
		end(err)
		if err != nil && !errors.Is(err, errEnded) && ctx.Err() == nil {
			a.Log.Warn("a published volume cannot be looked after", "target", target, "sandbox_id", b.id, "error", err)
		}
		return nil
	})
}

// publishing tells whether a volume is being published.
func (a *Agent) publishing(target string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.tasks[target]
	return t != nil && t.running()
}

// attempt publishes once. If pending is true, the sandbox mounts the volume when its container starts.
func (a *Agent) attempt(ctx context.Context, target string, b podSandbox) (pending bool, err error) {
	d, ok := a.Records.Get(target)
	if !ok {
		return false, errEnded
	}
	if err := a.runtimes.register(ctx, d, b); err != nil {
		return false, err
	}
	if err := failpoint.Err("agent.registered"); err != nil {
		return false, err
	}
	// Whatever becomes of the call, the record says who must release the volume, and by which name.
	if !d.in(b.id) {
		if err := a.Records.Place(target, b.id, false); err != nil {
			return false, err
		}
		if d, ok = a.Records.Get(target); !ok {
			return false, errEnded
		}
	}
	if err := failpoint.Err("agent.placed"); err != nil {
		return false, err
	}
	pending, err = a.runtimes.publish(ctx, d, b.id)
	if err != nil {
		return false, err
	}
	if pending {
		a.Log.Info("the sandbox has a volume, and mounts it when its container starts", "volume_id", d.VolumeID, "sandbox_id", b.id)
	}
	if err := failpoint.Err("agent.published"); err != nil {
		return false, err
	}
	return pending, a.Records.Place(target, b.id, true)
}

// publish repeats that until it has an answer: it asks a busy, slow or absent runtime again.
func (a *Agent) publish(ctx context.Context, target string, b podSandbox, t *task) (pending bool, err error) {
	const shortest, longest = 50 * time.Millisecond, 5 * time.Second
	for wait := shortest; ; wait = min(2*wait, longest) {
		pending, err := a.attempt(ctx, target, b)
		if err == nil {
			return pending, nil
		}
		d, ok := a.Records.Get(target)
		if !ok || errors.Is(ctx.Err(), context.Canceled) {
			return false, fmt.Errorf("the volume at %s: %w", target, errEnded)
		}
		code := status.Code(err)
		err = fmt.Errorf("volume %s: it was left to the pod's sandbox, and cannot be mounted there: %w", d.Volume, err)
		again := code == codes.Aborted || code == codes.Unavailable || code == codes.DeadlineExceeded
		if code != codes.Aborted {
			a.tell(d.Pod, corev1.EventTypeWarning, EventFailed, err.Error(), "")
			a.Log.Error("publishing in a sandbox", "volume_id", d.VolumeID, "pod", d.Pod.Namespace+"/"+d.Pod.Name,
				"sandbox_id", b.id, "again", again, "error", err)
			t.mu.Lock()
			t.last = err
			t.mu.Unlock()
		}
		if !again || ctx.Err() != nil {
			a.Count("failed")
			return false, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// unpublishTimeout bounds how long a release may take.
const unpublishTimeout = 30 * time.Second

// letGo makes the runtime release a volume for good. It cancels a running publish, and none starts
// until allow is called.
func (a *Agent) letGo(ctx context.Context, target string) (allow func(), err error) {
	a.mu.Lock()
	a.ending[target], a.leaves[target] = true, true
	t := a.tasks[target]
	delete(a.tasks, target)
	a.mu.Unlock()
	allow = func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.ending, target)
	}
	if t != nil {
		t.cancel()
		<-t.done
	}
	d, ok := a.Records.Get(target)
	if !ok || d.Sandbox == "" {
		return allow, nil
	}
	ctx, cancel := context.WithTimeout(ctx, unpublishTimeout)
	defer cancel()
	const pause = 200 * time.Millisecond
	for {
		err := a.runtimes.unpublish(ctx, d)
		if status.Code(err) == codes.Aborted {
			// It may still be mounting it, for an abandoned call.
			select {
			case <-time.After(pause):
				continue
			case <-ctx.Done():
				return allow, status.Errorf(codes.Aborted, "volume %s: the runtime is still busy with it in the pod's sandbox: %s",
					d.VolumeID, err)
			}
		}
		if err != nil && status.Code(err) != codes.NotFound && a.readsBesideOthers(d) {
			return allow, uncertain("volume %s: the runtime does not say that the pod's sandbox has released it: %s", d.VolumeID, err)
		}
		if err != nil {
			// The driver checks the device, which proves more than a runtime that is gone. A
			// refusal is tried again.
			a.Log.Warn("the runtime does not let go of a volume", "volume_id", d.VolumeID, "sandbox_id", d.Sandbox, "error", err)
		}
		failpoint.Hit("agent.released")
		return allow, nil
	}
}

// stays notes that a target is wanted.
func (a *Agent) stays(target string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.leaves, target)
}

// forget removes the record of a deferral that has ended.
func (a *Agent) forget(target string) error {
	a.stays(target)
	return a.Records.Remove(target)
}

// readsBesideOthers tells whether other deferrals of a volume that is let go exist that stay, all of which only read. Then the
// driver cannot see whether one sandbox still has the device. If all are to go, it can: the device is free or not.
func (a *Agent) readsBesideOthers(d Deferral) bool {
	if _, reads := d.Options["ro"]; !reads {
		return false
	}
	all := a.Records.All()
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(all, func(o Deferral) bool {
		return o.VolumeID == d.VolumeID && !a.leaves[o.Target]
	})
}

// publishAll publishes a pod's deferrals, and waits up to hookPatience. Slower ones go on; until
// then the containers are refused. It does not wait again for a publish that has run that long: the
// runtime holds up all pods of the node meanwhile.
func (a *Agent) publishAll(ctx context.Context, uid string, b podSandbox) error {
	var errs []error
	var all []*task
	for _, d := range a.Records.Of(uid) {
		all = append(all, a.start(d.Target, b))
	}
	for _, t := range all {
		patience, cancel := context.WithDeadline(ctx, t.began.Add(a.hookPatience))
		select {
		case <-t.done:
		case <-patience.Done():
		}
		cancel()
		if !t.running() {
			errs = append(errs, t.err)
		}
	}
	return errors.Join(errs...)
}

// missing returns what a pod's containers must wait for, nil for nothing. It makes no call.
func (a *Agent) missing(uid, sandbox string) error {
	for _, d := range a.Records.Of(uid) {
		if d.in(sandbox) {
			continue
		}
		a.mu.Lock()
		t := a.tasks[d.Target]
		a.mu.Unlock()
		if t != nil && t.sandbox == sandbox {
			if err := t.failure(); err != nil {
				return err
			}
		}
		return fmt.Errorf("volume %s: it is being mounted in the pod's sandbox; a container can have it when that is done", d.Volume)
	}
	return nil
}
