package qemu

import (
	"net"
	"time"

	"golang.org/x/time/rate"

	"github.com/crust-csi/crust-csi/internal/paced"
)

// A guest is untrusted, so what it can send is bounded. gRPC needs up to 330 bytes of memory for each byte of an answer that comes in small
// frames with padding, and it queues 40 bytes for every frame of a stream that has ended.
const (
	mostOfAnswer = 16 << 10  // bytes; paths, numbers and short texts
	mostOfReport = 128 << 10 // bytes; it names all volumes
	mostOfOutput = 512 << 10 // bytes, of ExecInSandbox
	heard        = 4 << 20   // bytes in a second
	atOnce       = 1 << 20   // bytes in a burst, before the rate applies
	dialled      = 4         // new connections in a second
)

// guestConn is a connection to a guest that is read at a limited rate. It ends when the guest takes nothing for the timeout.
type guestConn struct {
	net.Conn
	timeout time.Duration
	limit   *rate.Limiter
}

func (c *guestConn) Read(p []byte) (int, error) {
	return paced.Reader{R: c.Conn, Limit: c.limit}.Read(p)
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
