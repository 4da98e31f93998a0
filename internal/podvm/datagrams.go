package podvm

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

const (
	mostSessions = 1024
	mostQueued   = 4 << 20 // bytes of datagrams that wait for the guest, of all sessions
	mostWaiting  = 64      // datagrams of one session that wait
	mostDatagram = 64 << 10
	sessionIdle  = time.Minute
)

// datagrams carries datagrams between the pod's network namespace and the guest. What does not fit is lost, as in any network.
type datagrams struct {
	guest guestv1.PodClient

	mu       sync.Mutex
	sessions map[client]*session
	queued   int
}

// client is who sends datagrams to a socket of the monitor's.
type client struct {
	socket *net.UDPConn
	addr   netip.AddrPort
}

// session is a client's part of a port: the guest has a socket for it, so that answers find their client.
type session struct {
	in   chan []byte
	last time.Time
	idle *time.Timer // ends it
	end  context.CancelFunc
}

// receive passes on what clients send to a socket, until that is closed.
func (d *datagrams) receive(ctx context.Context, socket *net.UDPConn, port uint32) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b := make([]byte, mostDatagram)
	for {
		n, from, err := socket.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of memory, for example
			continue
		}
		d.take(ctx, client{socket, from}, port, b[:n])
	}
}

// take queues a datagram in its session, which it begins if there is none. Of too many sessions, the one ends that was idle longest.
func (d *datagrams) take(ctx context.Context, from client, port uint32, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sessions[from]
	if s == nil {
		if len(d.sessions) >= mostSessions {
			d.drop(d.longestIdle())
		}
		s = &session{in: make(chan []byte, mostWaiting)}
		ctx, s.end = context.WithCancel(ctx)
		s.idle = time.AfterFunc(sessionIdle, s.end)
		d.sessions[from] = s
		go d.carry(ctx, from, s, port)
	}
	if d.queued+len(b) > mostQueued {
		return
	}
	select {
	case s.in <- bytes.Clone(b):
		d.queued += len(b)
		s.last = time.Now()
		s.idle.Reset(sessionIdle)
	default:
	}
}

func (d *datagrams) longestIdle() client {
	var found client
	var at time.Time
	for c, s := range d.sessions {
		if at.IsZero() || s.last.Before(at) {
			found, at = c, s.last
		}
	}
	return found
}

// drop ends a session, and forgets what waits in it.
func (d *datagrams) drop(c client) {
	s := d.sessions[c]
	delete(d.sessions, c)
	s.idle.Stop()
	s.end()
	for {
		select {
		case b := <-s.in:
			d.queued -= len(b)
		default:
			return
		}
	}
}

// carry carries a session's datagrams, until it is idle or the guest ends it.
func (d *datagrams) carry(ctx context.Context, c client, s *session, port uint32) {
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.sessions[c] == s {
			d.drop(c)
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := d.guest.Connect(ctx, grpc.MaxCallRecvMsgSize(2*mostDatagram))
	if err != nil || stream.Send(&guestv1.ConnectRequest{What: &guestv1.ConnectRequest_UdpPort{UdpPort: port}}) != nil {
		return
	}
	go func() {
		defer cancel()
		for {
			select {
			case b := <-s.in:
				d.mu.Lock()
				d.queued -= len(b)
				d.mu.Unlock()
				if stream.Send(&guestv1.ConnectRequest{What: &guestv1.ConnectRequest_Data{Data: b}}) != nil {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		r, err := stream.Recv()
		if err != nil {
			return
		}
		_, _ = c.socket.WriteToUDPAddrPort(r.GetData(), c.addr) // lost, as in any network
		d.mu.Lock()
		s.last = time.Now()
		d.mu.Unlock()
		s.idle.Reset(sessionIdle)
	}
}
