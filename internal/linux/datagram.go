package linux

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// NextDatagram waits until a datagram can be read, and returns its length in bytes: recv(2) with MSG_PEEK and MSG_TRUNC. Whoever waits for
// many sockets needs no buffer for each.
func NextDatagram(c *net.UDPConn) (length int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	werr := raw.Read(func(fd uintptr) (done bool) {
		length, _, err = unix.Recvfrom(int(fd), nil, unix.MSG_PEEK|unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	return length, errors.Join(werr, err)
}

// ReuseAddress lets another socket that does the same have a UDP socket's port too, socket(7) SO_REUSEADDR. It is for
// net.ListenConfig.Control.
func ReuseAddress(_, _ string, c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
	return errors.Join(cerr, err)
}
