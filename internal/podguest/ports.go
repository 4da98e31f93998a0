package podguest

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// lookAgain is how often to look who listens: the kernel does not notify anybody.
const lookAgain = 200 * time.Millisecond

// Ports tells where the containers listen, until the caller cancels.
func (s *Server) Ports(_ *guestv1.PortsRequest, to guestv1.Pod_PortsServer) error {
	var told []place
	for first := true; ; first = false {
		places, err := s.look()
		if err != nil {
			return err
		}
		if first || !slices.Equal(places, told) {
			r := &guestv1.PortsResponse{}
			for _, p := range places {
				r.Ports = append(r.Ports, &guestv1.Port{Number: uint32(p.port), Loopback: p.loopback, Udp: p.udp})
			}
			if err := to.Send(r); err != nil {
				return err
			}
			told = places
		}
		select {
		case <-to.Context().Done():
			return nil
		case <-time.After(lookAgain):
		}
	}
}

// look finds where the containers listen now.
func (s *Server) look() ([]place, error) {
	places, err := listening("/proc/net")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.places = places
	return places, err
}

// serverOf returns the address of the server that has a port.
func (s *Server) serverOf(udp bool, port uint32) string {
	is := func(p place) bool { return p.udp == udp && uint32(p.port) == port }
	s.mu.Lock()
	places := s.places
	s.mu.Unlock()
	at := slices.IndexFunc(places, is)
	if at < 0 {
		places, _ = s.look() // nobody has it then
		at = slices.IndexFunc(places, is)
	}
	host := "127.0.0.1"
	if at >= 0 {
		host = places[at].host.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// place is a port on which a container listens.
type place struct {
	udp      bool
	port     uint16
	host     netip.Addr // where this process reaches it
	loopback bool       // only the pod itself reaches it
}

// localPorts has the range of ports that the kernel gives to sockets that ask for none, ip(7).
const localPorts = "/proc/sys/net/ipv4/ip_local_port_range"

// States of sockets, include/net/tcp_states.h. A UDP socket without a peer counts as closed.
const listens, closed = "0A", "07"

// listening reads the tables in a directory, proc(5). A TCP socket must listen. A UDP socket must have no peer, and a port outside
// localPorts: the kernel gives those to clients.
func listening(dir string) ([]place, error) {
	tcp, err := portsOf(func(_ uint16, state string) bool { return state == listens }, dir+"/tcp", dir+"/tcp6")
	if err != nil {
		return nil, err
	}
	var low, high uint16
	if b, err := os.ReadFile(localPorts); err != nil {
		return nil, err
	} else if _, err := fmt.Sscan(string(b), &low, &high); err != nil {
		return nil, fmt.Errorf("%s: %w", localPorts, err)
	}
	server := func(port uint16, state string) bool { return state == closed && (port < low || port > high) }
	udp, err := portsOf(server, dir+"/udp", dir+"/udp6")
	if err != nil {
		return nil, err
	}
	for i := range udp {
		udp[i].udp = true
	}
	return append(tcp, udp...), nil
}

// portsOf returns the ports of the sockets that are meant, in order. Of several sockets with a port, it chooses the one that most others
// reach: of all addresses, of one, of a loopback address.
func portsOf(meant func(port uint16, state string) bool, tables ...string) ([]place, error) {
	found := map[uint16]netip.Addr{}
	for _, table := range tables {
		b, err := os.ReadFile(table)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			const local, state = 1, 3
			f := strings.Fields(line)
			if len(f) <= state {
				continue
			}
			text, number, _ := strings.Cut(f[local], ":")
			port, err := strconv.ParseUint(number, 16, 16)
			address, ok := parseAddress(text)
			if err != nil || !ok || !meant(uint16(port), f[state]) {
				continue
			}
			if before, known := found[uint16(port)]; !known || reach(address) > reach(before) {
				found[uint16(port)] = address
			}
		}
	}
	var list []place
	for port, address := range found {
		p := place{port: port, host: address, loopback: address.IsLoopback()}
		switch address {
		case netip.IPv4Unspecified():
			p.host = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case netip.IPv6Unspecified(): // also if the socket is for IPv6 only
			p.host = netip.IPv6Loopback()
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b place) int { return int(a.port) - int(b.port) })
	return list, nil
}

func reach(a netip.Addr) int {
	switch {
	case a == netip.IPv4Unspecified():
		return 3
	case a == netip.IPv6Unspecified():
		return 2
	case !a.IsLoopback():
		return 1
	}
	return 0
}

// parseAddress parses an address in the form of /proc/net/tcp: 32-bit words, each in the order of this machine's bytes.
func parseAddress(text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%net.IPv4len != 0 {
		return netip.Addr{}, false
	}
	for i := 0; i < len(b); i += net.IPv4len {
		slices.Reverse(b[i : i+net.IPv4len])
	}
	a, ok := netip.AddrFromSlice(b)
	return a.Unmap(), ok
}

// Connect carries a connection to a port of the pod.
func (s *Server) Connect(stream guestv1.Pod_ConnectServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", s.serverOf(false, first.GetPort()))
	if err != nil {
		return fault.New(fault.State, "%w", err)
	}
	defer c.Close()
	received, read := make(chan error, 1), newActivity()
	go func() { received <- receiveData(stream, c.(*net.TCPConn), read) }()
	if err := sendData(stream, c); err != nil {
		return err
	}
	// A kernel does not wait for ever either, tcp(7) tcp_fin_timeout: a client may keep connections that servers have closed.
	for {
		select {
		case err := <-received:
			return err
		case <-stream.Context().Done(): // while the container takes nothing, for example
			return stream.Context().Err()
		case <-time.After(time.Second):
			if read.since() >= finTimeout {
				return nil
			}
		}
	}
}

const finTimeout = time.Minute

// receiveData passes on what the peer sends, until its end. An error closes the connection.
func receiveData(stream guestv1.Pod_ConnectServer, c *net.TCPConn, read *activity) error {
	for {
		r, err := stream.Recv()
		read.note()
		if errors.Is(err, io.EOF) {
			_ = c.CloseWrite() // if it has ended, the other direction shows that
			return nil
		}
		if err == nil {
			read.begin()
			_, err = c.Write(r.GetData())
			read.end()
		}
		if err != nil {
			_ = c.Close()
			return reset(err)
		}
	}
}

// sendData passes on what the container sends, until its end.
func sendData(stream guestv1.Pod_ConnectServer, c net.Conn) error {
	b := make([]byte, 32<<10)
	for {
		n, err := c.Read(b)
		if n > 0 {
			if err := stream.Send(&guestv1.ConnectResponse{Data: b[:n]}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return stream.Send(&guestv1.ConnectResponse{EndOfData: true})
		}
		if err != nil {
			return reset(err)
		}
	}
}

func reset(err error) error { return fault.New(fault.State, "the connection was reset: %w", err) }
