// Package channel connects a host to the agent in its guest, over a virtio-serial port, or over
// vsock if available.
package channel

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/vsock"

	"github.com/crust-csi/crust-csi/internal/vport"
)

// PortName is the name of the guest's virtio-serial port, PodPortName that of a pod's containers.
const (
	PortName    = "crust.guest"
	PodPortName = "crust.pod"
)

// Check reports whether Dial supports an address: the absolute path of the socket that QEMU serves
// for the port, or vsock:CID:PORT.
func Check(address string) error {
	if _, _, ok := parse(address); ok || filepath.IsAbs(address) {
		return nil
	}
	return fmt.Errorf("channel %q: give the absolute path of a socket, or vsock:CID:PORT", address)
}

func parse(address string) (cid, port uint32, ok bool) {
	rest, ok := strings.CutPrefix(address, "vsock:")
	first, second, two := strings.Cut(rest, ":")
	c, cerr := strconv.ParseUint(first, 10, 32)
	p, perr := strconv.ParseUint(second, 10, 32)
	return uint32(c), uint32(p), ok && two && cerr == nil && perr == nil
}

// Dial connects to a guest's agent. magic begins connections over a virtio-serial port; vsock needs
// none.
func Dial(ctx context.Context, address string, magic []byte) (net.Conn, error) {
	return DialThrough(ctx, address, magic, func(c net.Conn) net.Conn { return c })
}

// DialThrough is Dial, but reads and writes go through the connection that through returns, from the first byte on.
func DialThrough(ctx context.Context, address string, magic []byte, through func(net.Conn) net.Conn) (net.Conn, error) {
	cid, port, ok := parse(address)
	if !ok {
		return vport.DialThrough(ctx, address, magic, through)
	}
	type result struct {
		conn *vsock.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		c, err := vsock.Dial(cid, port, nil)
		done <- result{c, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, r.err
		}
		return through(r.conn), nil
	case <-ctx.Done():
		go func() { // it ends by itself, usually after two seconds
			if r := <-done; r.err == nil {
				_ = r.conn.Close() // nobody needs it any more
			}
		}()
		return nil, ctx.Err()
	}
}

// Listen is the guest's end. address is vsock:PORT, or empty for the virtio-serial port. Over
// vsock, it accepts only the peer with that context id, because other processes in the guest could
// also connect.
func Listen(address string, magic []byte, peer uint32) (net.Listener, error) {
	if address == "" {
		return ListenPort(PortName, magic)
	}
	text, ok := strings.CutPrefix(address, "vsock:")
	port, err := strconv.ParseUint(text, 10, 32)
	if !ok || err != nil {
		return nil, fmt.Errorf("listen %q: vsock:PORT, or nothing", address)
	}
	l, err := vsock.Listen(uint32(port), nil)
	if err != nil {
		return nil, err
	}
	return &guarded{l, peer}, nil
}

type guarded struct {
	net.Listener
	peer uint32
}

func (g *guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if a, ok := c.RemoteAddr().(*vsock.Addr); ok && a.ContextID == g.peer {
			return c, nil
		}
		c.Close()
	}
}

// ListenPort serves the guest's virtio-serial port of that name, which may appear a little later.
func ListenPort(name string, magic []byte) (net.Listener, error) {
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if b, err := os.ReadFile(n); err != nil || strings.TrimSpace(string(b)) != name {
				continue
			}
			port, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			if err != nil {
				return nil, err
			}
			return vport.Listen(port, magic), nil
		}
	}
	return nil, fmt.Errorf("this machine has no virtio-serial port %s", name)
}
