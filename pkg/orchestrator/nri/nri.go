// Package nri calls an orchestrator.Agent from a container runtime's NRI hooks
// (https://github.com/containerd/nri). It is a package of its own, because NRI links a WebAssembly
// runtime.
package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/orchestrator"
)

// hooks are the methods of an Agent that a container runtime's events call.
type hooks interface {
	Resume(sandboxes []orchestrator.Sandbox)
	SandboxStarted(ctx context.Context, s orchestrator.Sandbox) error
	ContainerStarts(ctx context.Context, s orchestrator.Sandbox) error
	MountSources(s orchestrator.Sandbox, sources []string) ([]string, error)
	SandboxEnds(ctx context.Context, s orchestrator.Sandbox)
}

// Plugin is an NRI plugin.
type Plugin struct {
	agent hooks
	log   *slog.Logger
}

// New returns the plugin of an agent. It logs to the agent's log.
func New(a *orchestrator.Agent) *Plugin { return &Plugin{agent: a, log: a.Log} }

func sandbox(pod *api.PodSandbox) orchestrator.Sandbox {
	return orchestrator.Sandbox{ID: pod.GetId(), PodUID: pod.GetUid(), PID: int64(pod.GetPid())}
}

// Synchronize learns what runs, after each connection. It does not block.
func (p *Plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	all := make([]orchestrator.Sandbox, len(pods))
	for i, pod := range pods {
		all[i] = sandbox(pod)
	}
	p.agent.Resume(all)
	return nil, nil
}

// RunPodSandbox publishes the pod's deferred volumes; an error fails the pod.
func (p *Plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.agent.SandboxStarted(ctx, sandbox(pod))
}

// CreateContainer refuses a container whose pod's volumes are not there. It replaces the sources of mounts by those of MountSources.
func (p *Plugin) CreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment,
	[]*api.ContainerUpdate, error) {
	if err := p.agent.ContainerStarts(ctx, sandbox(pod)); err != nil {
		return nil, nil, err
	}
	mounts := c.GetMounts()
	sources := make([]string, len(mounts))
	for i, m := range mounts {
		sources[i] = m.GetSource()
	}
	next, err := p.agent.MountSources(sandbox(pod), sources)
	if err != nil {
		return nil, nil, err
	}
	var change *api.ContainerAdjustment
	for i, source := range next {
		if source == sources[i] {
			continue
		}
		if change == nil {
			change = &api.ContainerAdjustment{}
		}
		m := mounts[i]
		change.AddMount(&api.Mount{Destination: m.GetDestination(), Type: m.GetType(), Source: source, Options: m.GetOptions()})
	}
	return change, nil, nil
}

// StopPodSandbox lets go of the sandbox. It never fails: the sandbox ends in any case.
func (p *Plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	p.agent.SandboxEnds(ctx, sandbox(pod))
	return nil
}

// libraryLog writes the library's log.
type libraryLog struct{ *slog.Logger }

func (l libraryLog) Debugf(_ context.Context, f string, a ...any) {
	l.Debug("NRI: " + fmt.Sprintf(f, a...))
}
func (l libraryLog) Infof(_ context.Context, f string, a ...any) {
	l.Debug("NRI: " + fmt.Sprintf(f, a...))
}
func (l libraryLog) Warnf(_ context.Context, f string, a ...any) {
	l.Warn("NRI: " + fmt.Sprintf(f, a...))
}
func (l libraryLog) Errorf(_ context.Context, f string, a ...any) {
	l.Error("NRI: " + fmt.Sprintf(f, a...))
}

// start starts a stub. If the runtime goes away midway, Start can block for ever, with the lock that
// Stop needs. Such a stub is abandoned, and stopped if its Start ends after all.
func start(ctx context.Context, s stub.Stub) error {
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

// withRemedy adds the remedy to the error of an attempt to connect, if nobody serves the socket.
func withRemedy(err error) error {
	if !errors.Is(err, linux.ENOENT) && !errors.Is(err, linux.ECONNREFUSED) {
		return err
	}
	return fmt.Errorf("%w; if this lasts, enable NRI in containerd's configuration and restart containerd (docs/crust-on-kubernetes.md), "+
		"or correct the path of the socket", err)
}

// Serve keeps a connection to the container runtime until ctx ends. It calls connected with nil
// after each connect, and with the error of each failure. connected may be nil.
func (p *Plugin) Serve(ctx context.Context, socket string, connected func(error)) {
	if connected == nil {
		connected = func(error) {}
	}
	const shortest, longest = 200 * time.Millisecond, 10 * time.Second
	for wait := shortest; ctx.Err() == nil; wait = min(2*wait, longest) {
		begin := time.Now()
		s, err := stub.New(p, stub.WithPluginName("crust-agent"), stub.WithPluginIdx("10"), stub.WithSocketPath(socket),
			stub.WithLogger(libraryLog{p.log}))
		if err == nil {
			if err = start(ctx, s); err == nil {
				connected(nil)
				p.log.Info("connected to NRI", "socket", socket)
				stop := context.AfterFunc(ctx, s.Stop)
				s.Wait()
				stop()
				err = errors.New("the connection has ended")
			}
			err = withRemedy(err)
		}
		if ctx.Err() != nil {
			return
		}
		connected(fmt.Errorf("NRI at %s: %w", socket, err))
		p.log.Warn("NRI", "socket", socket, "error", err)
		if time.Since(begin) > longest {
			wait = shortest
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}
