package podguest

import (
	"net"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// mostClients is how many clients have a socket, and clientIdle how long a socket stays that nothing was sent to or by.
const (
	mostClients = 1024
	clientIdle  = 3 * time.Minute
)

// clients has a socket for each client, so that answers find their client.
type clients struct {
	mu      sync.Mutex // also for what is sent
	stream  guestv1.Pod_DatagramsServer
	sockets map[uint64]*clientSocket
}

type clientSocket struct {
	*net.UDPConn
	last time.Time
}

// Datagrams passes on the datagrams of the pod's clients, until its caller cancels.
func (s *Server) Datagrams(stream guestv1.Pod_DatagramsServer) error {
	c := &clients{stream: stream, sockets: map[uint64]*clientSocket{}}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for number := range c.sockets {
			c.drop(number)
		}
	}()
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		socket := c.of(r.GetClient(), func() string { return s.serverOf(true, r.GetPort()) })
		if socket == nil {
			continue // lost, as in any network
		}
		if _, err := socket.Write(r.GetData()); err != nil { // nobody has the port: the kernel tells either Write or Read
			c.ended(r.GetClient(), socket)
		}
	}
}

// of returns a client's socket. Of too many, the one that was idle longest is closed.
func (c *clients) of(number uint64, server func() string) *clientSocket {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sockets[number]
	if s == nil {
		made, err := net.Dial("udp", server())
		if err != nil {
			return nil
		}
		if len(c.sockets) >= mostClients {
			c.drop(c.longestIdle())
		}
		s = &clientSocket{UDPConn: made.(*net.UDPConn)}
		c.sockets[number] = s
		go c.answer(number, s)
	}
	s.touch()
	return s
}

// touch notes that a socket is in use.
func (s *clientSocket) touch() {
	s.last = time.Now()
	_ = s.SetReadDeadline(s.last.Add(clientIdle)) // it is open, or answer sees that it is not
}

func (c *clients) longestIdle() (number uint64) {
	var found *clientSocket
	for n, s := range c.sockets {
		if found == nil || s.last.Before(found.last) {
			number, found = n, s
		}
	}
	return number
}

func (c *clients) drop(number uint64) {
	_ = c.sockets[number].Close() // answer sees it
	delete(c.sockets, number)
}

// ended drops a socket, unless that was done before.
func (c *clients) ended(number uint64, s *clientSocket) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sockets[number] == s {
		c.drop(number)
	}
}

// answer passes on what a server sends to a client. A socket that waits has no buffer.
func (c *clients) answer(number uint64, s *clientSocket) {
	defer c.ended(number, s)
	for {
		length, err := linux.NextDatagram(s.UDPConn)
		if err != nil {
			return
		}
		b := make([]byte, max(1, length)) // Read does not take an empty datagram into an empty buffer
		n, err := s.Read(b)
		if err != nil {
			return
		}
		c.mu.Lock()
		if c.sockets[number] == s {
			s.touch()
			err = c.stream.Send(&guestv1.DatagramsResponse{Client: number, Data: b[:n]})
		}
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}
