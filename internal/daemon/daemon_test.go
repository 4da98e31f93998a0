package daemon

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/grpclog"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// C20: gRPC itself logs nothing: what a daemon is connected to could make it write a line for each frame.
func TestC20_GRPCLogsOnlyIfItIsAskedTo(t *testing.T) {
	const again = "CRUST_TEST_LOGS"
	if os.Getenv(again) != "" {
		Main("test", func([]string) error { grpclog.Error("said by a guest"); return nil })
		return
	}
	for level, want := range map[string]bool{"": false, "error": true} {
		c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), again+"=1", "GRPC_GO_LOG_SEVERITY_LEVEL="+level)
		out, err := c.CombinedOutput()
		if said := strings.Contains(string(out), "said by a guest"); err != nil || said != want {
			t.Errorf("level %q: %v %s", level, err, out)
		}
	}
}

// slow answers when it is let go.
type slow struct {
	healthv1.UnimplementedHealthServer
	called, answer chan struct{}
}

func (s *slow) Check(context.Context, *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	close(s.called)
	<-s.answer
	return &healthv1.HealthCheckResponse{}, nil
}

func listen(t *testing.T) (net.Listener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l, "unix://" + path
}

// inFlight returns servers with a call in flight, which ends after server.answer.
func inFlight(t *testing.T) (s *Servers, server *slow, answered <-chan error) {
	t.Helper()
	s = NewServers(slog.New(slog.DiscardHandler))
	t.Cleanup(s.Close)
	l, at := listen(t)
	g := grpc.NewServer()
	server = &slow{called: make(chan struct{}), answer: make(chan struct{})}
	healthv1.RegisterHealthServer(g, server)
	s.GRPC(g, l)
	conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	answer := make(chan error, 1)
	go func() {
		_, err := healthv1.NewHealthClient(conn).Check(context.Background(), &healthv1.HealthCheckRequest{})
		answer <- err
	}()
	<-server.called
	return s, server, answer
}

// D06: SIGTERM, or the metrics' server fails. A call in flight is answered, and only then is the rest of the daemon stopped: it ends what
// must not outlive the process, such as the freeze of a volume that is copied.
func TestACallInFlightIsAnsweredBeforeTheEnd(t *testing.T) {
	broken := errors.New("accept: no descriptors")
	for _, why := range []error{nil, broken} {
		s, server, answered := inFlight(t)
		if why != nil {
			s.failed <- why
		} else if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-s.Context.Done()
		waited := make(chan error, 1)
		stopped := false
		go func() {
			waited <- s.Wait("", func(ctx context.Context) { stopped = ctx.Err() == nil })
		}()
		select {
		case err := <-waited:
			t.Errorf("the daemon ends with a call in flight: %v", err)
			close(server.answer)
			return
		case <-time.After(100 * time.Millisecond):
		}
		close(server.answer)
		if err := <-answered; err != nil {
			t.Errorf("the call: %v", err)
		}
		if err := <-waited; !errors.Is(err, why) || !stopped || !errors.Is(s.Err(), why) {
			t.Errorf("%v, the rest was stopped: %v, %v", err, stopped, s.Err())
		}
	}
}

// A server that fails ends the daemon, with its error.
func TestAServerThatFailsEndsTheDaemon(t *testing.T) {
	s := NewServers(slog.New(slog.DiscardHandler))
	defer s.Close()
	if err := s.HTTP("127.0.0.1:0", http.NotFoundHandler()); err != nil {
		t.Fatal(err)
	}
	if err := s.HTTP("here", http.NotFoundHandler()); err == nil || !strings.Contains(err.Error(), "--metrics-address") {
		t.Errorf("a bad address: %v", err)
	}
	l, _ := listen(t)
	s.GRPC(grpc.NewServer(), l)
	if s.Err() != nil || s.Context.Err() != nil {
		t.Error(s.Err())
	}
	l.Close()
	if err := s.Wait(""); !errors.Is(err, net.ErrClosed) || !errors.Is(s.Err(), net.ErrClosed) || s.Context.Err() == nil {
		t.Errorf("%v, %v", err, s.Err())
	}
}

// Somebody removes a socket that the daemon needs: one that it serves, or another one. The daemon ends with an error, also if servers fail
// too. A stop removes sockets and is no error.
func TestADaemonWithoutItsSocketEnds(t *testing.T) {
	for _, other := range []bool{false, true} {
		s := NewServers(slog.New(slog.DiscardHandler))
		l, at := listen(t)
		path := strings.TrimPrefix(at, "unix://")
		s.GRPC(grpc.NewServer(), l)
		if other {
			path = filepath.Join(t.TempDir(), "other")
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			s.Needs(path)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		select {
		case <-s.Context.Done():
		case <-time.After(time.Minute):
			t.Fatalf("the daemon goes on without %s", path)
		}
		if err := s.Wait(""); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("it ended with %v", err)
		}
		s.Close()
	}
}

func TestFlagsOfEachDaemon(t *testing.T) {
	for args, refused := range map[string]string{
		"": "", "-v 4 --log-format json --metrics-address :9": "", "--log-format xml": `--log-format "xml"`, "-v 1 more": `"more"`,
	} {
		var o Flags
		f := flag.NewFlagSet("d", flag.ContinueOnError)
		o.AddTo(f, "levels")
		o.AddMetrics(f)
		if err := f.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		if err := o.Check(f.Args()); (err != nil) != (refused != "") || err != nil && !strings.Contains(err.Error(), refused) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
