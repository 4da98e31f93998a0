package podvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podguest"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// forwarded returns a forwarding to a guest's agent in this process.
func forwarded(t *testing.T) *forwarding {
	t.Helper()
	guest, err := podguest.New()
	if err != nil {
		t.Fatal(err)
	}
	socket := t.TempDir() + "/guest.sock"
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	guestv1.RegisterPodServer(s, guest)
	go func() { _ = s.Serve(l) }() // until Stop
	t.Cleanup(s.Stop)
	conn, err := dial("unix://" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return newForwarding(guestv1.NewPodClient(conn))
}

// carried returns a client's connection, and where the server has it.
func carried(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	f := forwarded(t)
	inside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	outside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go f.accept(ctx, outside, uint32(inside.Addr().(*net.TCPAddr).Port))
	t.Cleanup(func() { outside.Close() })
	c, err := net.Dial("tcp", outside.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	in, err := inside.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	for _, c := range []net.Conn{c, in} {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	return c.(*net.TCPConn), in.(*net.TCPConn)
}

// Each direction of a connection ends by itself, whichever side ends first.
func TestC24_HalfOfAConnectionEnds(t *testing.T) {
	for _, first := range []string{"client", "server"} {
		client, server := carried(t)
		one, other := client, server
		if first == "server" {
			one, other = server, client
		}
		if _, err := io.WriteString(one, "first"); err != nil {
			t.Fatal(err)
		}
		if err := one.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(other); string(b) != "first" || err != nil {
			t.Errorf("what the %s sent: %q %v", first, b, err)
		}
		if _, err := io.WriteString(other, "second"); err != nil {
			t.Fatal(err)
		}
		if err := other.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(one); string(b) != "second" || err != nil {
			t.Errorf("what came back to the %s: %q %v", first, b, err)
		}
	}
}

// A client sees a reset as a reset: it must not take half an answer for a whole one.
func TestC24_AResetIsNoEnd(t *testing.T) {
	client, server := carried(t)
	if _, err := io.WriteString(server, "half"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(client, b); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(server.SetLinger(0), server.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(b); !errors.Is(err, linux.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
}

// What a guest says cannot look like a line of the host's.
func TestC24_AGuestForgesNoLineOfTheLog(t *testing.T) {
	pods := Pods{t.TempDir()}
	p := made(t, pods, "pod")
	f, w, err := p.open(monitorLog, mostOfLog)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m := &monitor{pod: p, log: w}
	m.say("the containers do not end:", errors.New("x\n"+theEnd+" forged\x1b[2J"))
	b, err := os.ReadFile(p.at(monitorLog))
	if want := fmt.Sprintln("the containers do not end: x " + theEnd + ` forged\x1b[2J`); string(b) != want || err != nil {
		t.Errorf("%q %v", b, err)
	}
	if err := p.keepLog(); err != nil {
		t.Fatal(err)
	}
	if names, err := entries(pods.Dir + "/.ended"); len(names) != 0 || err != nil {
		t.Errorf("it is taken for a pod that had to end: %q %v", names, err)
	}
}

// A guest can have the monitor report as many errors as it likes. Why its pod had to end is kept all the same.
func TestC24_AGuestThatTalksHidesNoEnd(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	f, w, err := p.open(monitorLog, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m := &monitor{pod: p, log: w, ended: make(chan error, 1)}
	for range 100 {
		m.say("ports:", errors.New("from the guest"))
	}
	m.ended <- fmt.Errorf("%w: signal: killed", errQEMU)
	if err := m.why(<-m.ended); !errors.Is(err, errQEMU) {
		t.Error(err)
	}
	b, err := os.ReadFile(p.at(monitorLog))
	want := "\n" + theEnd + " QEMU has ended: signal: killed\n"
	if !strings.HasSuffix(string(b), want) || len(b) > 100+len(want) || err != nil {
		t.Errorf("%q %v", b, err)
	}
}

func TestC19_QEMUsEndIsTheCause(t *testing.T) {
	m := &monitor{ended: make(chan error, 4)}
	m.ended <- errors.New("virtiofsd has ended")
	m.ended <- fmt.Errorf("%w: %w", errQEMU, errors.New("signal: killed"))
	if err := m.cause(errors.New("passt has ended")); !errors.Is(err, errQEMU) {
		t.Error(err)
	}
	if err := m.cause(errors.New("passt has ended")); err == nil || err.Error() != "passt has ended" {
		t.Error(err)
	}
}

// C24: a server that listened on a loopback address and then listens on all is reached at once, and never more ports are taken than may be.
func TestC24_PortsAreGivenBackBeforeOthersAreTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	number := uint32(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	f := newForwarding(nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer func() { cancel(); f.listen(ctx, nil) }()
	for _, loopback := range []bool{true, false, true} {
		if !f.listen(ctx, []*guestv1.Port{{Number: number, Loopback: loopback}}) {
			t.Errorf("loopback %v: a port is not had", loopback)
		}
	}
	many := make([]*guestv1.Port, 2*mostPorts)
	for i := range many {
		many[i] = &guestv1.Port{Number: uint32(20000 + i)}
	}
	const udp = 20000
	f.listen(ctx, append(many, &guestv1.Port{Number: udp, Udp: true}))
	if len(f.open) > mostPorts+1 || f.open[fmt.Sprint("udp:", udp)] == nil {
		t.Errorf("%d ports are taken, for datagrams %v", len(f.open), f.open[fmt.Sprint("udp:", udp)])
	}
}

// C20: crust-oci writes to the log, too, for each container whose guest does not end it.
func TestC20_AGuestFillsNoLogThroughCrustOCI(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	text := strings.Repeat("x", 1000)
	for range 2 * mostOfLog / len(text) {
		p.say("delete:", errors.New(text))
	}
	p.say(theEnd, "its monitor did not end in time")
	b, err := os.ReadFile(p.at(monitorLog))
	end := "\n" + theEnd + " its monitor did not end in time\n"
	if !strings.HasSuffix(string(b), end) || len(b) < mostOfLog || len(b) > mostOfLog+2*len(text) || err != nil {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}
