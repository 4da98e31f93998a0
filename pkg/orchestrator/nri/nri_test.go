package nri

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/orchestrator"
)

// called records the hooks that were called.
type called struct {
	names     []string
	sandboxes []orchestrator.Sandbox
	err       error
}

func (c *called) note(name string, s ...orchestrator.Sandbox) {
	c.names, c.sandboxes = append(c.names, name), append(c.sandboxes, s...)
}

func (c *called) Resume(all []orchestrator.Sandbox) { c.note("Resume", all...) }

func (c *called) SandboxStarted(_ context.Context, s orchestrator.Sandbox) error {
	c.note("SandboxStarted", s)
	return c.err
}

func (c *called) ContainerStarts(_ context.Context, s orchestrator.Sandbox) error {
	c.note("ContainerStarts", s)
	return c.err
}

func (c *called) MountSources(_ orchestrator.Sandbox, sources []string) (got []string, err error) {
	for _, source := range sources {
		got = append(got, strings.Replace(source, "/bound/", "/volume/", 1))
	}
	return got, nil
}

func (c *called) SandboxEnds(_ context.Context, s orchestrator.Sandbox) { c.note("SandboxEnds", s) }

// Each hook reaches the agent with the pod's sandbox. An agent's error fails the pod or keeps the
// container from starting.
func TestC22_HooksReachTheAgent(t *testing.T) {
	refused := errors.New("refused")
	c := &called{err: refused}
	p := &Plugin{agent: c, log: slog.New(slog.DiscardHandler)}
	pod, ended := &api.PodSandbox{Id: "sb", Uid: "u1", Pid: 7}, &api.PodSandbox{Id: "old", Uid: "u2"}
	if _, err := p.Synchronize(t.Context(), []*api.PodSandbox{pod, ended}, nil); err != nil {
		t.Error(err)
	}
	if err := p.RunPodSandbox(t.Context(), pod); !errors.Is(err, refused) {
		t.Errorf("a pod whose volumes cannot be published: %v", err)
	}
	if _, _, err := p.CreateContainer(t.Context(), pod, nil); !errors.Is(err, refused) {
		t.Errorf("a container whose volumes are not there: %v", err)
	}
	if err := p.StopPodSandbox(t.Context(), pod); err != nil {
		t.Error(err)
	}
	is := orchestrator.Sandbox{ID: "sb", PodUID: "u1", PID: 7}
	if want := []string{"Resume", "SandboxStarted", "ContainerStarts", "SandboxEnds"}; !slices.Equal(c.names, want) {
		t.Errorf("called: %q", c.names)
	}
	if want := []orchestrator.Sandbox{is, {ID: "old", PodUID: "u2"}, is, is, is}; !slices.Equal(c.sandboxes, want) {
		t.Errorf("with: %+v", c.sandboxes)
	}
}

// C15: a mount whose source is another for the runtime gets that source. Nothing else of it changes, and no other mount.
func TestC15_TheRuntimeGetsTheSourcesOfSubPaths(t *testing.T) {
	c := &called{}
	p := &Plugin{agent: c, log: slog.New(slog.DiscardHandler)}
	container := &api.Container{Mounts: []*api.Mount{
		{Destination: "/etc/hosts", Type: "bind", Source: "/pods/hosts"},
		{Destination: "/data", Type: "bind", Source: "/bound/c/0", Options: []string{"rbind", "ro"}},
	}}
	got, _, err := p.CreateContainer(t.Context(), &api.PodSandbox{Id: "sb", Uid: "u1"}, container)
	if err != nil || len(got.GetMounts()) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	if m := got.GetMounts()[0]; m.GetDestination() != "/data" || m.GetType() != "bind" || m.GetSource() != "/volume/c/0" ||
		!slices.Equal(m.GetOptions(), []string{"rbind", "ro"}) {
		t.Errorf("%v", m)
	}
	container.Mounts = container.GetMounts()[:1]
	if got, _, err := p.CreateContainer(t.Context(), &api.PodSandbox{}, container); got != nil || err != nil {
		t.Errorf("no mount is another: %v, %v", got, err)
	}
}

// A caller that wants no word of the connection gives nil. A failed attempt is then only logged, and
// others follow.
func TestC22_NobodyListensToTheNRIConnection(t *testing.T) {
	log, written := io.Pipe()
	agent, err := orchestrator.New(orchestrator.Config{
		Driver: &grpc.ClientConn{}, Pods: &orchestrator.Pods{}, Records: &orchestrator.Records{}, // none is used
		Log: slog.New(slog.NewTextHandler(written, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := agent.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		New(agent).Serve(ctx, t.TempDir()+"/none.sock", nil)
	}()
	lines := bufio.NewReader(log)
	for range 2 {
		if line, err := lines.ReadString('\n'); err != nil || !strings.Contains(line, "none.sock") {
			t.Errorf("an attempt is logged as %q, %v", line, err)
		}
	}
	cancel()
	log.Close() // nobody reads on
	<-ended
}
