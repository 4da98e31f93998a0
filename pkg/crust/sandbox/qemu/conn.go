package qemu

import (
	"net"
	"time"

	"golang.org/x/time/rate"
)

// A guest is untrusted, so what it can send is bounded. gRPC needs up to 330 bytes of memory for each byte of an answer that comes in small
// frames with padding, and it queues 40 bytes for every frame of a stream that has ended.
const (
	mostOfAnswer = 16 << 10  // bytes; paths, numbers and short texts
	mostOfReport = 128 << 10 // bytes; it names all volumes
	mostOfOutput = 512 << 10 // bytes, of ExecInSandbox
	heard        = 4 << 20   // bytes in a second
	atOnce       = 1 << 20   // bytes, before that counts
)

// guestConn is a connection to a guest that is read at a limited rate. It ends when the guest takes nothing for the timeout.
type guestConn struct {
	net.Conn
	timeout time.Duration
	limit   *rate.Limiter
}

func newGuestConn(c net.Conn, timeout time.Duration) *guestConn {
	return &guestConn{c, timeout, rate.NewLimiter(heard, atOnce)}
}

func (c *guestConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p[:min(len(p), atOnce)])
	time.Sleep(c.limit.ReserveN(time.Now(), n).Delay())
	return n, err
}

// Write closes the connection if it fails. gRPC leaves that to its reader, which does not notice while the guest goes on sending.
func (c *guestConn) Write(p []byte) (int, error) {
	err := c.SetWriteDeadline(time.Now().Add(c.timeout))
	n := 0
	if err == nil {
		n, err = c.Conn.Write(p)
	}
	if err != nil {
		c.Close()
	}
	return n, err
}
