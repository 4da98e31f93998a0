package podguest

import (
	"net"
	"strconv"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// carryDatagrams passes on the datagrams of one client, until its caller cancels or nobody has the port any more.
func carryDatagrams(stream guestv1.Pod_ConnectServer, port uint32) error {
	host := "127.0.0.1"
	// A socket of IPv6 may be for IPv6 only. Its loopback address reaches it whatever it is bound to.
	is := func(s socket) bool { return s.port == uint64(port) }
	if list, err := ports(is, "/proc/net/udp"); err == nil && len(list) == 0 {
		host = "::1"
	}
	c, err := net.Dial("udp", net.JoinHostPort(host, strconv.Itoa(int(port))))
	if err != nil {
		return reset(err)
	}
	defer c.Close()
	go func() {
		defer c.Close()
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			_, _ = c.Write(r.GetData()) // Read returns that nobody has the port
		}
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		if err != nil {
			return reset(err)
		}
		if err := stream.Send(&guestv1.ConnectResponse{Data: b[:n]}); err != nil {
			return err
		}
	}
}
