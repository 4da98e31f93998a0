package qemu

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// busy is a guest that stops at its first call, and goes on when gone is closed. Until then it reads nothing, so it answers no ping.
type busy struct {
	guestv1.UnimplementedGuestServer
	net.Listener
	called sync.Once
	stops  chan struct{}
	gone   chan struct{}
}

type busyConn struct {
	net.Conn
	b *busy
}

func (b *busy) Accept() (net.Conn, error) {
	c, err := port{b.Listener}.Accept()
	return busyConn{c, b}, err
}

func (c busyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	select {
	case <-c.b.stops:
		<-c.b.gone
	default:
	}
	return n, err
}

func (b *busy) Stats(context.Context, *guestv1.StatsRequest) (*guestv1.StatsResponse, error) {
	b.called.Do(func() { close(b.stops) })
	<-b.gone
	return &guestv1.StatsResponse{}, nil
}

// guestsPort listens where a guest's port is.
func guestsPort(t *testing.T) (registration, net.Listener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "guest") // a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	how := registration{Channel: filepath.Join(dir, "port")}
	l, err := net.Listen("unix", how.Channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return how, l
}

// A guest that gets no processor for a while keeps its connection, as long as crustd's --timeout permits. After that it is given up.
func TestAGuestThatIsBusyForAWhile(t *testing.T) {
	t.Parallel()
	const while = 22 * time.Second // gRPC sends a ping after 10 s without an answer, or later
	for name, c := range map[string]struct {
		timeout time.Duration
		want    codes.Code
	}{"within the timeout": {time.Minute, codes.OK}, "longer": {time.Second, codes.Unavailable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			how, l := guestsPort(t)
			b := &busy{Listener: l, stops: make(chan struct{}), gone: make(chan struct{})}
			g := grpc.NewServer()
			guestv1.RegisterGuestServer(g, b)
			t.Cleanup(g.Stop)
			go func() { _ = g.Serve(b) }()
			conn, err := how.dial(c.timeout)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			end := time.AfterFunc(while, func() { close(b.gone) })
			_, err = guestv1.NewGuestClient(conn).Stats(t.Context(), &guestv1.StatsRequest{})
			if got := status.Code(err); got != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
			if end.Stop() {
				close(b.gone)
			}
		})
	}
}
