package podvm

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

const (
	mostClients  = 1024
	mostQueued   = 1 << 20 // bytes of datagrams that wait for the guest
	mostWaiting  = 1024    // datagrams
	mostDatagram = 64 << 10
	clientIdle   = 3 * time.Minute // after it, a guest has nothing to say to a client
)

// datagrams carries datagrams between the pod's network namespace and the guest, all of them in one stream: what the guest does not take is
// bounded, and costs a container's streams their share of the guest's port only once. What does not fit is lost, as in any network.
type datagrams struct {
	guest guestv1.PodClient
	queue chan *guestv1.DatagramsRequest

	mu      sync.Mutex
	queued  int // bytes
	number  uint64
	clients map[endpoint]*client
	numbers map[uint64]*client
}

func newDatagrams(guest guestv1.PodClient) *datagrams {
	return &datagrams{guest: guest, queue: make(chan *guestv1.DatagramsRequest, mostWaiting),
		clients: map[endpoint]*client{}, numbers: map[uint64]*client{}}
}

// endpoint is where a client sends from, and the socket of the monitor's that it sends to.
type endpoint struct {
	socket *net.UDPConn
	from   netip.AddrPort
}

type client struct {
	endpoint
	number uint64
	last   time.Time
}

// receive passes on what clients send to a socket, until that is closed.
func (d *datagrams) receive(ctx context.Context, socket *net.UDPConn, port uint32) {
	for {
		length, err := linux.NextDatagram(socket)
		var from netip.AddrPort
		b := make([]byte, max(1, length))
		if err == nil {
			length, from, err = socket.ReadFromUDPAddrPort(b)
		}
		switch {
		case errors.Is(err, net.ErrClosed) || ctx.Err() != nil:
			return
		case err != nil:
			time.Sleep(10 * time.Millisecond) // out of memory, for example
		default:
			d.take(endpoint{socket, from}, port, b[:length])
		}
	}
}

// take queues a datagram. Of too many clients, the one is forgotten that was idle longest.
func (d *datagrams) take(from endpoint, port uint32, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queued+len(b) > mostQueued || len(d.queue) == cap(d.queue) {
		return
	}
	c := d.clients[from]
	if c == nil {
		if len(d.clients) >= mostClients {
			d.forget(d.longestIdle())
		}
		d.number++
		c = &client{endpoint: from, number: d.number}
		d.clients[from], d.numbers[c.number] = c, c
	}
	c.last = time.Now()
	d.queued += len(b)
	d.queue <- &guestv1.DatagramsRequest{Client: c.number, Port: port, Data: b} // it has room: only this function sends
}

func (d *datagrams) longestIdle() (found *client) {
	for _, c := range d.clients {
		if found == nil || c.last.Before(found.last) {
			found = c
		}
	}
	return found
}

func (d *datagrams) forget(c *client) {
	delete(d.clients, c.endpoint)
	delete(d.numbers, c.number)
}

// carry carries datagrams until ctx ends or the guest has enough.
func (d *datagrams) carry(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := d.guest.Datagrams(ctx, grpc.MaxCallRecvMsgSize(mostDatagram+1024))
	if err != nil {
		return err
	}
	go func() {
		for {
			select {
			case r := <-d.queue:
				d.mu.Lock()
				d.queued -= len(r.GetData())
				d.mu.Unlock()
				if stream.Send(r) != nil {
					return // Recv returns why
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		d.answer(r)
	}
}

// answer passes on what a server sends. A guest can send only to who has sent something to it lately.
func (d *datagrams) answer(r *guestv1.DatagramsResponse) {
	d.mu.Lock()
	c, now := d.numbers[r.GetClient()], time.Now()
	if c != nil && now.Sub(c.last) > clientIdle {
		d.forget(c)
		c = nil
	}
	if c != nil {
		c.last = now
	}
	d.mu.Unlock()
	if c == nil {
		return
	}
	_ = c.socket.SetWriteDeadline(now.Add(100 * time.Millisecond)) // a client that is out of reach holds up no other
	_, _ = c.socket.WriteToUDPAddrPort(r.GetData(), c.from)        // lost, as in any network
}
