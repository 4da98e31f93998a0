package podvm

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// answering has a server that answers each datagram with the same, and "!".
func answering(t *testing.T, address string) uint32 {
	t.Helper()
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		t.Fatal(err)
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
	return uint32(c.LocalAddr().(*net.UDPAddr).Port)
}

// Each client gets its answers, as datagrams of their length, also of a server of IPv6 alone.
func TestC24_DatagramsFindTheirClients(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		f := forwarded(t)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		port := answering(t, address)
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
					t.Fatalf("%s, client %d: %d bytes of %d: %v", address, i, n, len(want), err)
				}
			}
		}
	}
}

// C20: unknown clients, and a guest that takes nothing, cost a bounded number of sessions and bytes. All is free at the end.
func TestC20_DatagramsThatNobodyTakesAreLost(t *testing.T) {
	l, err := net.Listen("unix", t.TempDir()+"/silent")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := dial("unix://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	d := &newForwarding(guestv1.NewPodClient(conn)).datagrams
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	from := func(i int) client {
		return client{addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)}
	}
	b := make([]byte, 5000)
	for i := range 2 * mostSessions {
		d.take(ctx, from(i), 53, b)
	}
	for range 2 * mostWaiting {
		d.take(ctx, from(2*mostSessions-1), 53, b)
	}
	held := func() (sessions, queued int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.sessions), d.queued
	}
	if sessions, queued := held(); sessions != mostSessions || queued > mostQueued || queued < mostQueued/2 {
		t.Errorf("%d sessions, %d bytes", sessions, queued)
	}
	d.mu.Lock()
	_, first := d.sessions[from(0)]
	_, last := d.sessions[from(2*mostSessions-1)]
	d.mu.Unlock()
	if first || !last {
		t.Errorf("the session that was idle longest is there: %v; the newest: %v", first, last)
	}
	cancel()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		sessions, queued := held()
		if sessions == 0 && queued == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d sessions and %d bytes are left", sessions, queued)
		}
	}
}
