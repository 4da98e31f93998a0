package podvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

// mostOfMessage limits a message, in bytes. A config.json is smaller.
const mostOfMessage = 4 << 20

// window is how much a stream of a guest may send ahead, in bytes: all of its streams together take the memory of the pod's cgroup.
const window = 64 << 10

// serve connects to the guest, and passes on what stubs and crust-oci say to it.
func (m *monitor) serve(ctx context.Context, magic []byte) (stop func(), err error) {
	conn, err := grpc.NewClient("passthrough:///pod", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostOfMessage)), grpc.WithMaxHeaderListSize(16<<10),
		// Otherwise the window of each stream grows to 16 MiB, as its guest likes.
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(16*window),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			// gRPC's own dial deadline would interrupt a slow boot repeatedly.
			return vport.Dial(ctx, m.pod.at(guestSocket), magic)
		}))
	if err != nil {
		return nil, err
	}
	m.guest = guestv1.NewPodClient(conn)
	var servers []*grpc.Server
	stop = func() {
		for _, s := range servers {
			s.Stop()
		}
		conn.Close()
	}
	for socket, options := range map[string][]grpc.ServerOption{podSocket: nil, stubSocket: forStubs()} {
		l, err := linux.ListenPrivate(m.pod.at(socket), 0o600)
		if err != nil {
			stop()
			return nil, err
		}
		s := grpc.NewServer(append(options, grpc.MaxRecvMsgSize(mostOfMessage))...)
		guestv1.RegisterPodServer(s, m)
		go func() { _ = s.Serve(l) }() // until Stop
		servers = append(servers, s)
	}
	return stop, nil
}

// forStubs lets a caller run a process that was prepared, and no more: a stub carries what a tenant's process says.
func forStubs() []grpc.ServerOption {
	refused := func(method string) error {
		switch method {
		case guestv1.Pod_Run_FullMethodName, guestv1.Pod_Control_FullMethodName:
			return nil
		}
		return status.Errorf(codes.PermissionDenied, "%s is not for stubs", method)
	}
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, r any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := refused(info.FullMethod); err != nil {
				return nil, err
			}
			return handle(ctx, r)
		}),
		grpc.StreamInterceptor(func(server any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := refused(info.FullMethod); err != nil {
				return err
			}
			return handle(server, s)
		}),
	}
}

// begin waits for the guest, and sets it up.
func (m *monitor) begin(ctx context.Context, network *guestv1.Network) {
	_, err := m.guest.Begin(ctx, &guestv1.BeginRequest{Hostname: m.pod.Hostname, Network: network, Sysctls: m.pod.Sysctls},
		grpc.WaitForReady(true))
	if ctx.Err() != nil {
		return // the pod is being deleted
	}
	if err != nil {
		m.ended <- fmt.Errorf("the guest cannot begin: %w", err)
		return
	}
	close(m.begun)
	if network != nil {
		m.forward(ctx)
	}
}

// up waits until the guest has begun.
func (m *monitor) up(ctx context.Context) error {
	select {
	case <-m.begun:
		return nil
	case <-ctx.Done():
		return status.Errorf(codes.DeadlineExceeded, "the guest of pod %s has not booted yet", m.pod.ID)
	}
}

func (m *monitor) CreateContainer(ctx context.Context, r *guestv1.CreateContainerRequest) (*guestv1.CreateContainerResponse, error) {
	if err := m.up(ctx); err != nil {
		return nil, err
	}
	if err := m.disks.plug(ctx, r.GetBlockDevices()); err != nil {
		return nil, faultgrpc.Status(err)
	}
	return m.guest.CreateContainer(ctx, r)
}

func (m *monitor) PrepareProcess(ctx context.Context, r *guestv1.PrepareProcessRequest) (*guestv1.PrepareProcessResponse, error) {
	if err := m.up(ctx); err != nil {
		return nil, err
	}
	return m.guest.PrepareProcess(ctx, r)
}

// Control has nothing to wait for: Run has told that the process runs.
func (m *monitor) Control(ctx context.Context, r *guestv1.ControlRequest) (*guestv1.ControlResponse, error) {
	return m.guest.Control(ctx, r)
}

// DeleteContainer does not wait for a guest: one that has not begun has no containers.
func (m *monitor) DeleteContainer(ctx context.Context, r *guestv1.DeleteContainerRequest) (*guestv1.DeleteContainerResponse, error) {
	select {
	case <-m.begun:
		return m.guest.DeleteContainer(ctx, r)
	default:
		return &guestv1.DeleteContainerResponse{}, nil
	}
}

// Run passes on a stub's streams. A stub that ends takes its process with it.
func (m *monitor) Run(stub guestv1.Pod_RunServer) error {
	first, err := stub.Recv()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stub.Context())
	defer cancel()
	guest, err := m.guest.Run(ctx)
	if err != nil {
		return err
	}
	if err := guest.Send(first); err != nil && !errors.Is(err, io.EOF) { // after EOF, Recv has the reason
		return err
	}
	go func() {
		for {
			r, err := stub.Recv()
			if err == nil {
				err = guest.Send(r)
			}
			if err != nil {
				return // a stub that has ended ends its context, too
			}
		}
	}()
	for {
		r, err := guest.Recv()
		if r.GetStarted() || err != nil {
			m.note(first.GetContainerId())
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, last := r.GetWhat().(*guestv1.RunResponse_ExitStatus); last && r.GetOutOfMemory() {
			if err := m.pod.starve(first.GetContainerId()); err != nil {
				m.say("cannot report that container", first.GetContainerId(), "ran out of memory:", err)
			}
		}
		if err := stub.Send(r); err != nil {
			return err
		}
	}
}

// note tells crust-oci that a container's signals reach its process now, or that it has none.
func (m *monitor) note(container string) {
	if !idPattern.MatchString(container) {
		return
	}
	f, err := os.OpenFile(filepath.Join(m.pod.at("started"), container), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		m.say(err) // crust-oci waits in vain, and says so
		return
	}
	f.Close()
}
