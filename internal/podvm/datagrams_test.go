package podvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// answering has a server that answers each datagram with the same, and "!", on a port that is none of a client's.
func answering(t *testing.T, host string) (port uint32) {
	t.Helper()
	var c net.PacketConn
	var err error
	for port = 20000; ; port++ {
		if c, err = net.ListenPacket("udp", net.JoinHostPort(host, fmt.Sprint(port))); err == nil {
			break
		}
		if !errors.Is(err, linux.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, mostDatagram)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(append(b[:n:n], '!'), from) // the client sees it
		}
	}()
	return port
}

// Each client gets its answers, as datagrams of their length, also of a server of IPv6 alone or of another loopback address.
func TestC24_DatagramsFindTheirClients(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1", "127.0.0.53"} {
		t.Run(host, func(t *testing.T) { findTheirClients(t, host) })
	}
}

func findTheirClients(t *testing.T, host string) {
	f := forwarded(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _ = f.datagrams.carry(ctx) }() // until cancel
	port := answering(t, host)
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	go f.datagrams.receive(ctx, socket, port)
	clients := make([]net.Conn, 3)
	for i := range clients {
		if clients[i], err = net.Dial("udp", socket.LocalAddr().String()); err != nil {
			t.Fatal(err)
		}
		defer clients[i].Close()
	}
	for _, length := range []int{1, 0, 60_000} {
		for i, c := range clients {
			sent := bytes.Repeat([]byte{'a' + byte(i)}, length)
			if _, err := c.Write(sent); err != nil {
				t.Fatal(err)
			}
		}
		for i, c := range clients {
			_ = c.SetDeadline(time.Now().Add(time.Minute)) // it has a socket
			b := make([]byte, mostDatagram)
			n, err := c.Read(b)
			if want := append(bytes.Repeat([]byte{'a' + byte(i)}, length), '!'); !bytes.Equal(b[:n], want) || err != nil {
				t.Fatalf("%s, client %d: %d bytes of %d: %v", host, i, n, len(want), err)
			}
		}
	}
}

// silent is a guest whose agent begins to take datagrams, and takes none.
type silent struct {
	guestv1.UnimplementedPodServer
}

func (silent) Datagrams(stream guestv1.Pod_DatagramsServer) error {
	<-stream.Context().Done()
	return nil
}

// C20: unknown clients, and a guest that takes nothing, cost a bounded number of clients and bytes, and streams keep their share.
func TestC20_DatagramsThatNobodyTakesAreLost(t *testing.T) {
	l, err := net.Listen("unix", t.TempDir()+"/silent")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	guestv1.RegisterPodServer(server, silent{})
	go func() { _ = server.Serve(l) }() // until Stop
	defer server.Stop()
	conn, err := dial("unix://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	d := newForwarding(guestv1.NewPodClient(conn)).datagrams
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _ = d.carry(ctx) }() // until cancel
	const sent = 20 * mostClients
	b := make([]byte, 500)
	for i := range sent {
		d.take(someone(i), 53, b)
		if i%100 == 0 {
			time.Sleep(time.Millisecond) // the stream takes what it can
		}
	}
	d.mu.Lock()
	clients, numbers, queued := len(d.clients), len(d.numbers), d.queued
	taken := int(d.number)*len(b) - queued
	d.mu.Unlock()
	if clients > mostClients || numbers != clients || queued > mostQueued || queued == 0 {
		t.Errorf("%d clients, %d numbers, %d bytes", clients, numbers, queued)
	}
	if taken > 1<<20 {
		t.Errorf("the stream took %d bytes, which nobody took from it", taken)
	}
}

func someone(i int) endpoint {
	return endpoint{from: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)}
}

func TestC20_TheClientThatWasIdleLongestIsForgotten(t *testing.T) {
	d := newForwarding(nil).datagrams
	for i := range mostClients + 10 {
		d.take(someone(i), 53, nil)
		<-d.queue
	}
	_, oldest := d.clients[someone(9)]
	if len(d.clients) != mostClients || oldest || d.clients[someone(10)] == nil || d.clients[someone(mostClients+9)] == nil {
		t.Errorf("%d clients", len(d.clients))
	}
}

func TestC20_LargeDatagramsWaitInBoundedRoom(t *testing.T) {
	d := newForwarding(nil).datagrams
	b := make([]byte, 60_000)
	for range mostWaiting / 2 {
		d.take(endpoint{}, 53, b)
	}
	if d.queued > mostQueued || d.queued < mostQueued-len(b) || len(d.queue) != d.queued/len(b) {
		t.Errorf("%d bytes in %d datagrams", d.queued, len(d.queue))
	}
}

// A guest sends to those who have sent something to it, for as long as they may expect an answer, and to nobody else.
func TestC20_AGuestAnswersItsClientsOnly(t *testing.T) {
	listen := func() *net.UDPConn {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	socket, peer := listen(), listen()
	d := newForwarding(nil).datagrams
	at := endpoint{socket, peer.LocalAddr().(*net.UDPAddr).AddrPort()}
	d.take(at, 53, []byte("hello"))
	d.answer(&guestv1.DatagramsResponse{Client: 7, Data: []byte("of nobody")})
	d.answer(&guestv1.DatagramsResponse{Client: 1, Data: []byte("answer")})
	b := make([]byte, 100)
	if n, err := peer.Read(b); string(b[:n]) != "answer" || err != nil {
		t.Errorf("%q %v", b[:n], err)
	}
	d.clients[at].last = time.Now().Add(-clientIdle - time.Second)
	d.answer(&guestv1.DatagramsResponse{Client: 1, Data: []byte("late")})
	_ = peer.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // it is open
	if n, err := peer.Read(b); err == nil {
		t.Errorf("after a long time came %q", b[:n])
	}
}
