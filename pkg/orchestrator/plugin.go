package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/crust-csi/crust-csi/internal/failpoint"
)

// hookPatience bounds how long a hook delays the container runtime, which takes a plugin for dead
// after 2 s and goes on without it.
const hookPatience = 1500 * time.Millisecond

// Plugin is the agent's NRI plugin, https://github.com/containerd/nri.
type Plugin struct{ agent *Agent }

// Synchronize learns what runs, after each connection. It does not block.
func (p *Plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	a := p.agent
	alive := map[string]bool{} // ended ones are listed too, for a while
	for _, pod := range pods {
		alive[pod.GetId()] = pod.GetPid() != 0
	}
	for _, pod := range pods {
		b := box{pod.GetId(), int64(pod.GetPid())}
		for _, d := range a.Records.Of(pod.GetUid()) {
			begun := d.Sandbox == b.id && !d.Published // nobody may have seen the end
			if b.pid != 0 && (begun || !alive[d.Sandbox]) {
				a.Log.Info("publishing what was missed", "volume_id", d.VolumeID, "sandbox_id", b.id)
				a.start(d.Target, b)
			}
		}
	}
	return nil, nil
}

// RunPodSandbox publishes the pod's deferred volumes; an error fails the pod.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.agent.publishAll(ctx, pod.GetUid(), box{pod.GetId(), int64(pod.GetPid())})
}

// CreateContainer checks whether the pod's volumes are there. If not, because a publish failed or
// was never requested, it tries again.
func (p *Plugin) CreateContainer(ctx context.Context, pod *api.PodSandbox, _ *api.Container) (*api.ContainerAdjustment,
	[]*api.ContainerUpdate, error) {
	a, b := p.agent, box{pod.GetId(), int64(pod.GetPid())}
	for _, d := range a.Records.Of(pod.GetUid()) {
		if d.in(b.id) {
			a.refresh(d.Target, b)
		}
	}
	if err := a.publishAll(ctx, pod.GetUid(), b); err != nil {
		return nil, nil, err
	}
	return nil, nil, a.missing(pod.GetUid(), b.id)
}

// StopPodSandbox cancels running publishes and deregisters the sandbox. If that fails, the runtime
// sees the end of the sandbox's process.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	a := p.agent
	sockets := map[string]bool{}
	for _, d := range a.Records.Of(pod.GetUid()) {
		a.mu.Lock()
		if t := a.tasks[d.Target]; t != nil && t.sandbox == pod.GetId() {
			t.cancel()
		}
		a.mu.Unlock()
		if d.Sandbox == pod.GetId() {
			sockets[d.Socket] = true
		}
	}
	failpoint.Hit("agent.stopping")
	ctx, cancel := context.WithTimeout(ctx, a.hookPatience)
	defer cancel()
	for socket := range sockets {
		if err := a.runtimes.deregister(ctx, socket, pod.GetId()); err != nil {
			a.Log.Warn("a sandbox that ends is not deregistered yet", "sandbox_id", pod.GetId(), "error", err)
		}
	}
	return nil
}

// nriLog writes the library's log.
type nriLog struct{ *slog.Logger }

func (l nriLog) Debugf(_ context.Context, f string, a ...any) {
	l.Debug("NRI: " + fmt.Sprintf(f, a...))
}
func (l nriLog) Infof(_ context.Context, f string, a ...any) { l.Debug("NRI: " + fmt.Sprintf(f, a...)) }
func (l nriLog) Warnf(_ context.Context, f string, a ...any) { l.Warn("NRI: " + fmt.Sprintf(f, a...)) }
func (l nriLog) Errorf(_ context.Context, f string, a ...any) {
	l.Error("NRI: " + fmt.Sprintf(f, a...))
}

// startStub starts a plugin. If the runtime goes away midway, Start can block for ever, with the
// lock that Stop needs. Such a stub is abandoned, and stopped if its Start ends after all.
func startStub(ctx context.Context, s stub.Stub) error {
	const patience = 15 * time.Second
	started := make(chan error, 1)
	go func() { started <- s.Start(ctx) }()
	select {
	case err := <-started:
		return err
	case <-time.After(patience):
		go func() {
			if <-started == nil {
				s.Stop() // another may run by now
			}
		}()
		return fmt.Errorf("the runtime does not finish the connection within %s", patience)
	}
}

// ServeNRI keeps a connection to the container runtime until ctx ends. It calls connected with nil
// after each connect, and with the error of each failure.
func (a *Agent) ServeNRI(ctx context.Context, socket string, connected func(error)) {
	const shortest, longest = 200 * time.Millisecond, 10 * time.Second
	for wait := shortest; ctx.Err() == nil; wait = min(2*wait, longest) {
		begin := time.Now()
		s, err := stub.New(&Plugin{a}, stub.WithPluginName("crust-agent"), stub.WithPluginIdx("10"), stub.WithSocketPath(socket),
			stub.WithLogger(nriLog{a.Log}))
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
