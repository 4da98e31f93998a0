package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
)

// hookPatience is how long the container runtime is kept waiting: after 2 s it
// takes a plugin for dead, and goes on without it.
const hookPatience = 1500 * time.Millisecond

// publishTimeout bounds one attempt to publish a volume in a sandbox; giving many
// files to a group takes long.
const publishTimeout = 10 * time.Minute

// box is a pod's running sandbox.
type box struct {
	id  string
	pid int64
}

// task is a publish in a sandbox that is under way, or failed.
type task struct {
	sandbox string
	cancel  func()
	done    chan struct{}
	err     error // once done is closed
}

// start publishes a deferral in a sandbox, in the background; or finds that under
// way, or done.
func (a *Agent) start(d Deferral, b box) *task {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t := a.tasks[d.Target]; t != nil {
		select {
		case <-t.done:
		default:
			if t.sandbox == b.id {
				return t
			}
			t.cancel() // of a sandbox that the pod does not have any more
		}
	}
	ctx, cancel := context.WithTimeout(a.life, publishTimeout)
	t := &task{sandbox: b.id, cancel: cancel, done: make(chan struct{})}
	if a.ending[d.Target] || b.pid == 0 {
		// It is being unpublished, or the sandbox has ended.
		cancel()
		t.err = fmt.Errorf("volume %s: the pod is ending", d.Volume)
		close(t.done)
		return t
	}
	if now, ok := a.Records.Get(d.Target); ok && now.Sandbox == b.id {
		cancel()
		close(t.done)
		return t
	}
	a.tasks[d.Target] = t
	a.work.Go(func() {
		defer cancel()
		defer close(t.done)
		if t.err = a.publish(ctx, d, b); t.err == nil {
			a.Count("published")
			a.tell(d.Pod, corev1.EventTypeNormal, EventPublished, fmt.Sprintf("volume %s (%s) is mounted in the pod's sandbox", d.Volume, d.Type))
		}
	})
	return t
}

// publish does so until it has an answer: a runtime that is busy or away is asked
// again.
func (a *Agent) publish(ctx context.Context, d Deferral, b box) error {
	const shortest, longest = 50 * time.Millisecond, 5 * time.Second
	for wait := shortest; ; wait = min(2*wait, longest) {
		err := a.runtimes.publish(ctx, d, b.id, b.pid)
		if err == nil {
			var known bool
			if known, err = a.Records.Published(d.Target, b.id); err == nil && !known {
				// It was unpublished meanwhile, and nobody would undo this.
				d.Sandbox = b.id
				uctx, cancel := context.WithTimeout(a.life, unpublishTimeout)
				defer cancel()
				return errors.Join(fmt.Errorf("volume %s: the pod has ended", d.Volume), a.runtimes.unpublish(uctx, d))
			}
		}
		if err == nil {
			return nil
		}
		code := status.Code(err)
		err = fmt.Errorf("volume %s: it was left to the pod's sandbox, and cannot be mounted there: %w", d.Volume, err)
		if ctx.Err() != nil {
			return err
		}
		again := code == codes.Aborted || code == codes.Unavailable
		if code != codes.Aborted {
			a.tell(d.Pod, corev1.EventTypeWarning, EventFailed, err.Error())
			a.Log.Error("publishing in a sandbox", "volume_id", d.VolumeID, "pod", d.Pod.Namespace+"/"+d.Pod.Name, "sandbox_id", b.id, "again", again, "error", err)
		}
		if !again {
			a.Count("failed")
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// unpublishTimeout bounds what a runtime may take to let go.
const unpublishTimeout = 30 * time.Second

// end has the runtime let go of a volume for good: what is under way is ended, and
// nothing is begun until the returned function was called.
func (a *Agent) end(ctx context.Context, target string) (begin func()) {
	a.mu.Lock()
	a.ending[target] = true
	t := a.tasks[target]
	delete(a.tasks, target)
	a.mu.Unlock()
	if t != nil {
		t.cancel()
		<-t.done
	}
	d, ok := a.Records.Get(target)
	if ok && d.Sandbox == "" && t != nil {
		d.Sandbox = t.sandbox // it may have been done all the same
	}
	if ok && d.Sandbox != "" {
		uctx, cancel := context.WithTimeout(ctx, unpublishTimeout)
		defer cancel()
		if err := a.runtimes.unpublish(uctx, d); err != nil {
			// The driver asks the device, which knows better than a runtime that is
			// gone; what it refuses is tried again.
			a.Log.Warn("the runtime does not let go of a volume", "volume_id", d.VolumeID, "sandbox_id", d.Sandbox, "error", err)
		}
	}
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.ending, target)
	}
}

// publishAll publishes a pod's deferrals, and waits a little. What takes longer
// goes on; until then its containers are refused.
func (a *Agent) publishAll(ctx context.Context, uid string, b box) error {
	ctx, cancel := context.WithTimeout(ctx, hookPatience)
	defer cancel()
	var errs []error
	var all []*task
	for _, d := range a.Records.Of(uid) {
		all = append(all, a.start(d, b))
	}
	for _, t := range all {
		select {
		case <-t.done:
			errs = append(errs, t.err)
		case <-ctx.Done():
		}
	}
	return errors.Join(errs...)
}

// published tells what is missing for a pod's containers, nil for nothing. It
// asks nobody.
func (a *Agent) published(uid, sandbox string) error {
	for _, d := range a.Records.Of(uid) {
		if d.Sandbox == sandbox {
			continue
		}
		a.mu.Lock()
		t := a.tasks[d.Target]
		a.mu.Unlock()
		if t != nil {
			select {
			case <-t.done:
				if t.err != nil {
					return t.err
				}
			default:
			}
		}
		return fmt.Errorf("volume %s: it is being mounted in the pod's sandbox; a container can have it when that is done", d.Volume)
	}
	return nil
}

// Plugin is the agent's side of NRI, https://github.com/containerd/nri.
type Plugin struct{ agent *Agent }

// Synchronize is told of what runs, after each connection. It answers at once.
func (p *Plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	a := p.agent
	alive := map[string]bool{} // those that have ended are listed too, for a while
	for _, pod := range pods {
		alive[pod.GetId()] = pod.GetPid() != 0
	}
	for _, pod := range pods {
		b := box{pod.GetId(), int64(pod.GetPid())}
		for _, d := range a.Records.Of(pod.GetUid()) {
			if b.pid != 0 && !alive[d.Sandbox] {
				a.Log.Info("publishing what was missed", "volume_id", d.VolumeID, "sandbox_id", b.id)
				a.start(d, b)
			}
		}
	}
	return nil, nil
}

// RunPodSandbox publishes the pod's deferred volumes; an error fails the pod.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.agent.publishAll(ctx, pod.GetUid(), box{pod.GetId(), int64(pod.GetPid())})
}

// CreateContainer looks whether the pod's volumes are there. Where they are not,
// because a publish failed or because nobody was asked for it, it is tried again.
func (p *Plugin) CreateContainer(ctx context.Context, pod *api.PodSandbox, _ *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	err := p.agent.published(pod.GetUid(), pod.GetId())
	if err != nil {
		if terr := p.agent.publishAll(ctx, pod.GetUid(), box{pod.GetId(), int64(pod.GetPid())}); terr != nil {
			return nil, nil, terr
		}
		err = p.agent.published(pod.GetUid(), pod.GetId())
	}
	return nil, nil, err
}

// StopPodSandbox has the runtime let go; where it does not hear, it sees the end
// of the sandbox's process.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	a := p.agent
	sockets := map[string]bool{}
	for _, d := range a.Records.Of(pod.GetUid()) {
		if d.Sandbox == pod.GetId() {
			sockets[d.Socket] = true
		}
	}
	ctx, cancel := context.WithTimeout(ctx, hookPatience)
	defer cancel()
	for socket := range sockets {
		if err := a.runtimes.deregister(ctx, socket, pod.GetId()); err != nil {
			a.Log.Warn("a sandbox that ends is not deregistered yet", "sandbox_id", pod.GetId(), "error", err)
		}
	}
	return nil
}

// nriLog writes what the library says.
type nriLog struct{ *slog.Logger }

func (l nriLog) Debugf(_ context.Context, f string, a ...any) {
	l.Debug("NRI: " + fmt.Sprintf(f, a...))
}
func (l nriLog) Infof(_ context.Context, f string, a ...any) { l.Debug("NRI: " + fmt.Sprintf(f, a...)) }
func (l nriLog) Warnf(_ context.Context, f string, a ...any) { l.Warn("NRI: " + fmt.Sprintf(f, a...)) }
func (l nriLog) Errorf(_ context.Context, f string, a ...any) {
	l.Error("NRI: " + fmt.Sprintf(f, a...))
}

// startStub starts a plugin. The library may wait for ever for a runtime that goes
// away in the middle, holding a lock that Stop wants: that stub is left alone.
func startStub(ctx context.Context, s stub.Stub) error {
	const patience = 15 * time.Second
	started := make(chan error, 1)
	go func() { started <- s.Start(ctx) }()
	select {
	case err := <-started:
		return err
	case <-time.After(patience):
		return fmt.Errorf("the runtime does not finish the connection within %s", patience)
	}
}

// ServeNRI is connected to the container runtime until ctx ends. connected is told
// how that goes; nil for nobody.
func (a *Agent) ServeNRI(ctx context.Context, socket string, connected func(error)) {
	const shortest, longest = 200 * time.Millisecond, 10 * time.Second
	if connected == nil {
		connected = func(error) {}
	}
	log.Set(nriLog{a.Log})
	for wait := shortest; ctx.Err() == nil; wait = min(2*wait, longest) {
		begin := time.Now()
		s, err := stub.New(&Plugin{a}, stub.WithPluginName("crust-agent"), stub.WithPluginIdx("10"), stub.WithSocketPath(socket), stub.WithOnClose(func() {}))
		if err == nil {
			if err = startStub(ctx, s); err == nil {
				connected(nil)
				a.Log.Info("connected to NRI", "socket", socket)
				stop := context.AfterFunc(ctx, s.Stop)
				s.Wait()
				stop()
				err = errors.New("the connection has ended")
			}
		}
		if ctx.Err() != nil {
			return
		}
		connected(fmt.Errorf("NRI at %s: %w", socket, err))
		a.Log.Warn("NRI", "socket", socket, "error", err)
		if time.Since(begin) > longest {
			wait = shortest
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}
