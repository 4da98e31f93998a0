package podguest

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// host is the stream of a host's, of which the test keeps what the guest sends.
type host struct {
	grpc.ServerStream
	sent chan *guestv1.DatagramsResponse
}

func (h host) Context() context.Context                 { return context.Background() }
func (h host) Recv() (*guestv1.DatagramsRequest, error) { select {} }
func (h host) Send(r *guestv1.DatagramsResponse) error {
	select {
	case h.sent <- r:
	default: // the test has what it wants
	}
	return nil
}

func newClients(t *testing.T) (c *clients, server *net.UDPConn) {
	t.Helper()
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	c = &clients{stream: host{sent: make(chan *guestv1.DatagramsResponse, 8)}, sockets: map[uint64]*clientSocket{}}
	t.Cleanup(func() {
		server.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		for n := range c.sockets {
			c.drop(n)
		}
	})
	return c, server
}

// Each client has a socket; there are not more than may be, and the ones that were idle longest make room.
func TestC24_AServersClientsAreBounded(t *testing.T) {
	c, server := newClients(t)
	at := server.LocalAddr().String
	for n := range uint64(mostClients + 10) {
		if c.of(n, at) == nil {
			t.Fatalf("client %d has no socket", n)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.sockets) != mostClients || c.sockets[9] != nil || c.sockets[10] == nil || c.sockets[mostClients+9] == nil {
		t.Errorf("%d sockets", len(c.sockets))
	}
}

// An empty datagram is an answer, too, and the next one follows it.
func TestC24_AnEmptyAnswerIsOne(t *testing.T) {
	c, server := newClients(t)
	s := c.of(1, server.LocalAddr().String)
	for _, text := range []string{"", "x"} {
		if _, err := server.WriteTo([]byte(text), s.LocalAddr()); err != nil {
			t.Fatal(err)
		}
		select {
		case r := <-c.stream.(host).sent:
			if string(r.GetData()) != text || r.GetClient() != 1 {
				t.Errorf("of %q came %v", text, r)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%q did not come", text)
		}
	}
}
