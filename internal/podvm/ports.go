package podvm

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// mostPorts is how many ports of a protocol the monitor listens on for a guest, mostConnections how many connections may be open at a time.
const (
	mostPorts       = 256
	mostConnections = 1024
)

// forwarding carries connections from the pod's network namespace, where this process runs, to the containers in the guest.
type forwarding struct {
	guest guestv1.PodClient
	free  chan struct{} // a token for each further connection

	mu   sync.Mutex
	open map[string]io.Closer // sockets, by network, address and port

	datagrams *datagrams
}

func newForwarding(guest guestv1.PodClient) *forwarding {
	return &forwarding{guest: guest, free: make(chan struct{}, mostConnections), open: map[string]io.Closer{},
		datagrams: newDatagrams(guest)}
}

// forward listens where the guest's containers listen, until ctx ends.
func (m *monitor) forward(ctx context.Context) {
	f := newForwarding(m.guest)
	go m.again(ctx, "datagrams:", f.datagrams.carry)
	m.again(ctx, "ports:", f.follow)
	f.listen(ctx, nil) // closes them
}

// again calls do until ctx ends, and says why it ended earlier.
func (m *monitor) again(ctx context.Context, what string, do func(context.Context) error) {
	for ctx.Err() == nil {
		if err := do(ctx); err != nil && ctx.Err() == nil {
			m.say(what, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

func (f *forwarding) follow(ctx context.Context) error {
	stream, err := f.guest.Ports(ctx, &guestv1.PortsRequest{})
	if err != nil {
		return err
	}
	var ports []*guestv1.Port
	told, failed := make(chan []*guestv1.Port), make(chan error, 1)
	go func() {
		for {
			r, err := stream.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case told <- r.GetPorts():
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		// A port that is taken in the pod's network namespace may become free.
		var again <-chan time.Time
		if !f.listen(ctx, ports) {
			again = time.After(time.Second)
		}
		select {
		case ports = <-told:
		case <-again:
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// listen closes all but these ports and opens what is missing, in this order: there are never more than mostPorts, and an address that
// another took in is free. It tells whether it has them all.
func (f *forwarding) listen(ctx context.Context, ports []*guestv1.Port) (all bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	want := map[string]bool{}
	ports = firstOfEach(ports)
	for _, p := range ports {
		for _, address := range addresses(p) {
			want[network(p)+address] = true
		}
	}
	for address, l := range f.open {
		if !want[address] {
			l.Close()
			delete(f.open, address)
		}
	}
	all = true
	for _, p := range ports {
		for j, address := range addresses(p) {
			if f.open[network(p)+address] != nil {
				continue
			}
			l, err := f.serve(ctx, p, address)
			if err != nil {
				all = all && j > 0 // a machine without IPv6 has no ::1
				continue
			}
			f.open[network(p)+address] = l
		}
	}
	return all
}

// firstOfEach returns the first mostPorts of each protocol.
func firstOfEach(ports []*guestv1.Port) (list []*guestv1.Port) {
	has := map[bool]int{}
	for _, p := range ports {
		if has[p.GetUdp()] < mostPorts {
			list = append(list, p)
		}
		has[p.GetUdp()]++
	}
	return list
}

func network(p *guestv1.Port) string {
	if p.GetUdp() {
		return "udp"
	}
	return "tcp"
}

// serve takes connections or datagrams at an address, until what it returns is closed.
func (f *forwarding) serve(ctx context.Context, p *guestv1.Port, address string) (io.Closer, error) {
	if p.GetUdp() {
		// passt takes a port of a server that sends by itself.
		c, err := (&net.ListenConfig{Control: linux.ReuseAddress}).ListenPacket(ctx, "udp", address)
		if err != nil {
			return nil, err
		}
		go f.datagrams.receive(ctx, c.(*net.UDPConn), p.GetNumber())
		return c, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	go f.accept(ctx, l, p.GetNumber())
	return l, nil
}

// addresses returns where the monitor listens for a port of the guest.
func addresses(p *guestv1.Port) []string {
	number := strconv.Itoa(int(p.GetNumber() & 0xffff))
	if p.GetLoopback() {
		return []string{net.JoinHostPort("127.0.0.1", number), net.JoinHostPort("::1", number)}
	}
	return []string{net.JoinHostPort("", number)}
}

func (f *forwarding) accept(ctx context.Context, l net.Listener, port uint32) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of descriptors, for example
			continue
		}
		select {
		case f.free <- struct{}{}:
			go func() {
				defer func() { <-f.free }()
				defer c.Close()
				f.carry(ctx, c.(*net.TCPConn), port)
			}()
		default:
			c.Close()
		}
	}
}

// carry carries one connection. An error on either side ends it: both sides see that.
func (f *forwarding) carry(ctx context.Context, c *net.TCPConn, port uint32) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.guest.Connect(ctx, grpc.MaxCallRecvMsgSize(window))
	if err != nil {
		return
	}
	if stream.Send(&guestv1.ConnectRequest{What: &guestv1.ConnectRequest_Port{Port: port}}) != nil {
		return
	}
	go func() {
		b := make([]byte, 32<<10)
		for {
			n, err := c.Read(b)
			if n > 0 && stream.Send(&guestv1.ConnectRequest{What: &guestv1.ConnectRequest_Data{Data: b[:n]}}) != nil {
				return
			}
			if errors.Is(err, io.EOF) {
				_ = stream.CloseSend() // Recv shows what is wrong
				return
			}
			if err != nil {
				cancel()
				return
			}
		}
	}()
	for {
		r, err := stream.Recv()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				_ = c.SetLinger(0) // a reset, as the guest's kernel would send
			}
			return
		}
		if r.GetEndOfData() {
			err = c.CloseWrite()
		} else {
			_, err = c.Write(r.GetData())
		}
		if err != nil {
			return
		}
	}
}
