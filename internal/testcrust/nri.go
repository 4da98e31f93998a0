package testcrust

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
)

// ContainerRuntime is the runtime's side of NRI, as in containerd: it calls one plugin, and lists
// the sandboxes at each connection.
type ContainerRuntime struct {
	socket string

	mu        sync.Mutex
	client    api.PluginService
	sandboxes map[string]*api.PodSandbox
}

func newRuntime(t testing.TB, socket string) *ContainerRuntime {
	t.Helper()
	c := &ContainerRuntime{socket: socket, sandboxes: map[string]*api.PodSandbox{}}
	l, err := net.Listen("unix", socket)
	OK(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if err := c.connect(conn); err != nil {
				t.Errorf("NRI: %v", err)
			}
		}
	}()
	return c
}

func (c *ContainerRuntime) connect(conn net.Conn) error {
	mux := multiplex.Multiplex(conn, multiplex.WithBlockedRead())
	plugin, err := mux.Open(multiplex.PluginServiceConn)
	if err != nil {
		return err
	}
	l, err := mux.Listen(multiplex.RuntimeServiceConn)
	if err != nil {
		return err
	}
	s, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	var client api.PluginService
	client = api.NewPluginClient(ttrpc.NewClient(plugin, ttrpc.WithOnClose(func() {
		mux.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.client == client {
			c.client = nil
		}
	})))
	api.RegisterRuntimeService(s, &registrar{c, client})
	go func() { _ = s.Serve(context.Background(), l) }()
	mux.Unblock()
	return nil
}

// registrar receives a plugin's registration.
type registrar struct {
	c      *ContainerRuntime
	client api.PluginService
}

func (r *registrar) RegisterPlugin(context.Context, *api.RegisterPluginRequest) (*api.Empty, error) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), Longest())
		defer cancel()
		configure := &api.ConfigureRequest{RuntimeName: "containerd", RuntimeVersion: "2.1.0", NRIVersion: "v0.12.0"}
		if _, err := r.client.Configure(ctx, configure); err != nil {
			return // it has ended
		}
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		var all []*api.PodSandbox
		for _, sandbox := range r.c.sandboxes {
			all = append(all, sandbox)
		}
		if _, err := r.client.Synchronize(ctx, &api.SynchronizeRequest{Pods: all}); err == nil {
			r.c.client = r.client
		}
	}()
	return &api.Empty{}, nil
}

func (*registrar) UpdateContainers(context.Context, *api.UpdateContainersRequest) (*api.UpdateContainersResponse, error) {
	return nil, errors.New("nobody asks for it")
}

// Plugin is the agent's side, nil while no agent is connected.
func (c *ContainerRuntime) Plugin() api.PluginService {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.client
}
