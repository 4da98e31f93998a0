package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
)

// StopTimeout is how long calls in flight may take after SIGTERM.
const StopTimeout = 20 * time.Second

// endTimeout is how long what follows them may take at least. Both together end before a kubelet kills the process, 30 seconds after
// SIGTERM.
const endTimeout = 5 * time.Second

// socketCheck is how often the daemon checks whether its sockets are there.
const socketCheck = 2 * time.Second

// Servers are the servers of a daemon. Close must be called.
type Servers struct {
	// Context ends with SIGTERM or SIGINT, when a server fails, and when a socket was removed.
	Context context.Context

	log    *slog.Logger
	failed chan error
	all    context.Context // its cause is the error of the server that failed
	closes []func()
	grpc   *grpc.Server
}

// NewServers returns Servers that serve nothing yet.
func NewServers(log *slog.Logger) *Servers {
	s := &Servers{log: log, failed: make(chan error, 4)} // each that can fail has room, and waits for nobody
	all, fail := context.WithCancelCause(context.Background())
	ctx, stop := signal.NotifyContext(all, os.Interrupt, linux.SIGTERM)
	s.all, s.Context = all, ctx
	s.closes = append(s.closes, stop, func() { fail(nil) })
	go func() {
		select {
		case err := <-s.failed:
			fail(err)
		case <-all.Done():
		}
	}()
	return s
}

// Close stops what is served without waiting for calls.
func (s *Servers) Close() {
	for _, closes := range s.closes {
		closes()
	}
	if s.grpc != nil {
		s.grpc.Stop()
	}
}

// HTTP serves metrics and health, unless the address is empty: see rpcserver.ServeHTTP. It comes before GRPC: a client that reaches the
// daemon finds its health and metrics, too.
func (s *Servers) HTTP(address string, h http.Handler) error {
	closes, err := rpcserver.ServeHTTP(address, h, s.failed)
	if err == nil {
		s.closes = append(s.closes, closes)
	}
	return err
}

// GRPC serves at a listener, whose socket the daemon needs.
func (s *Servers) GRPC(g *grpc.Server, l net.Listener) {
	s.grpc = g
	go func() { s.failed <- g.Serve(l) }()
	if l.Addr().Network() == "unix" {
		s.Needs(l.Addr().String())
	}
}

// Needs fails, like a server, soon after somebody has removed a socket: nobody could connect to this process again, and nobody would
// restart it.
func (s *Servers) Needs(socket string) {
	go func() {
		tick := time.NewTicker(socketCheck)
		defer tick.Stop()
		for {
			select {
			case <-s.Context.Done(): // from now on sockets are removed by this process
				return
			case <-tick.C:
			}
			if _, err := os.Lstat(socket); errors.Is(err, fs.ErrNotExist) {
				s.failed <- fmt.Errorf("somebody removed the socket %s, so this process can no longer be reached; start it again, as a DaemonSet "+
					"does, and it makes the socket again", socket)
				return
			}
		}
	}()
}

// Err returns the error of the server that failed, or nil.
func (s *Servers) Err() error {
	if err := context.Cause(s.all); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Wait waits until Context ends. It logs what it says, lets calls in flight finish within StopTimeout, and then calls each of the
// functions. These have the rest of that time, and at least endTimeout: they end what must not outlive the process, such as the freeze of a
// volume that is copied. If a server failed, Wait does all this too, and returns that error.
func (s *Servers) Wait(stopping string, then ...func(context.Context)) error {
	<-s.Context.Done()
	failed := s.Err()
	if failed != nil {
		s.log.Error("stopping: "+stopping, "error", failed)
	} else {
		s.log.Info("stopping: " + stopping)
	}
	begin := time.Now()
	calls, cancel := context.WithDeadline(context.Background(), begin.Add(StopTimeout))
	defer cancel()
	drain(calls, s.grpc)
	end, cancel := context.WithTimeout(context.Background(), max(StopTimeout-time.Since(begin), endTimeout))
	defer cancel()
	for _, f := range then {
		f(end)
	}
	return failed
}

// drain lets calls in flight finish until ctx ends; then it cuts them off, which is as safe as a
// kill. It does not wait for calls that cannot be ended.
func drain(ctx context.Context, s *grpc.Server) {
	done := make(chan struct{})
	go func() { s.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		s.Stop()
	}
}
