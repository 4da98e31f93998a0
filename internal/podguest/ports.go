package podguest

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
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
	var told []*guestv1.Port
	for first := true; ; first = false {
		ports, err := listening("/proc/net")
		if err != nil {
			return err
		}
		if first || !slices.EqualFunc(ports, told, func(a, b *guestv1.Port) bool {
			return a.GetNumber() == b.GetNumber() && a.GetLoopback() == b.GetLoopback() && a.GetUdp() == b.GetUdp()
		}) {
			if err := to.Send(&guestv1.PortsResponse{Ports: ports}); err != nil {
				return err
			}
			told = ports
		}
		select {
		case <-to.Context().Done():
			return nil
		case <-time.After(lookAgain):
		}
	}
}

// localPorts has the range of ports that the kernel gives to sockets that ask for none, ip(7).
const localPorts = "/proc/sys/net/ipv4/ip_local_port_range"

// listening returns the ports of the tables in a directory, proc(5): of TCP, where sockets listen; of UDP, where sockets have no peer and
// their port was chosen, for those of clients are not.
func listening(dir string) ([]*guestv1.Port, error) {
	tcp, err := ports(func(s socket) bool { return s.state == "0A" }, dir+"/tcp", dir+"/tcp6")
	if err != nil {
		return nil, err
	}
	var low, high uint64
	if b, err := os.ReadFile(localPorts); err != nil {
		return nil, err
	} else if _, err := fmt.Sscan(string(b), &low, &high); err != nil {
		return nil, fmt.Errorf("%s: %w", localPorts, err)
	}
	udp, err := ports(func(s socket) bool {
		_, peer, _ := strings.Cut(s.peer, ":")
		return s.state == "07" && peer == "0000" && (s.port < low || s.port > high)
	}, dir+"/udp", dir+"/udp6")
	for _, p := range udp {
		p.Udp = true
	}
	return append(tcp, udp...), err
}

// socket is a line of a table.
type socket struct {
	port        uint64
	peer, state string
}

// ports returns the ports of sockets that are meant, in order. A port is a loopback port only if all addresses of such sockets are.
func ports(meant func(socket) bool, tables ...string) ([]*guestv1.Port, error) {
	found := map[int]bool{} // whether only the pod itself reaches it
	for _, table := range tables {
		b, err := os.ReadFile(table)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			const local, peer, state = 1, 2, 3
			f := strings.Fields(line)
			if len(f) <= state {
				continue
			}
			address, port, _ := strings.Cut(f[local], ":")
			number, err := strconv.ParseUint(port, 16, 16)
			if err != nil || !meant(socket{number, f[peer], f[state]}) {
				continue
			}
			only, known := found[int(number)]
			found[int(number)] = isLoopback(address) && (only || !known)
		}
	}
	var list []*guestv1.Port
	for number, loopback := range found {
		list = append(list, &guestv1.Port{Number: uint32(number), Loopback: loopback})
	}
	slices.SortFunc(list, func(a, b *guestv1.Port) int { return int(a.GetNumber()) - int(b.GetNumber()) })
	return list, nil
}

// isLoopback tells whether an address in the form of /proc/net/tcp is a loopback address: 32-bit words, each in the order of this machine's
// bytes.
func isLoopback(text string) bool {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%net.IPv4len != 0 {
		return false
	}
	for i := 0; i < len(b); i += net.IPv4len {
		slices.Reverse(b[i : i+net.IPv4len])
	}
	return net.IP(b).IsLoopback()
}

// Connect carries a connection to a port of the pod, or a client's datagrams.
func (s *Server) Connect(stream guestv1.Pod_ConnectServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if what, is := first.GetWhat().(*guestv1.ConnectRequest_UdpPort); is {
		return carryDatagrams(stream, what.UdpPort)
	}
	port := strconv.Itoa(int(first.GetPort()))
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		if c, err = net.Dial("tcp", net.JoinHostPort("::1", port)); err != nil {
			return fault.New(fault.State, "%w", err)
		}
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
			_, err = c.Write(r.GetData())
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
