package podvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/plain"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// Exit statuses of a stub whose process does not run, as runtimes and shells have them.
const (
	statusNotRun = 126
	statusLost   = 137 // the guest has ended, as by SIGKILL
)

// Stub stands for a process in the guest, and returns its exit status.
func Stub(ctx context.Context) int {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	conn, err := dial("unix:///pod.sock")
	if err != nil {
		return tell(err)
	}
	defer conn.Close()
	client := guestv1.NewPodClient(conn)
	stream, err := client.Run(ctx)
	if err != nil {
		return tell(err)
	}
	s := &stub{client: client, stream: stream, began: make(chan struct{})}
	first := &guestv1.RunRequest{What: &guestv1.RunRequest_ContainerId{ContainerId: os.Getenv("CRUST_CONTAINER")}}
	if token := os.Getenv("CRUST_TOKEN"); token != "" {
		first.What = &guestv1.RunRequest_Token{Token: token}
	}
	s.send(first)
	terminal := linux.RawTerminal(os.Stdin) == nil
	go s.control(ctx, signals, terminal)
	go s.input()
	return s.output()
}

func dial(endpoint string) (*grpc.ClientConn, error) {
	return grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("pod"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostOfMessage)))
}

// tell writes to standard error, which kubectl shows, why there is no process. The guest may have chosen the text.
func tell(err error) int {
	fmt.Fprintln(os.Stderr, plain.Text(status.Convert(err).Message(), plain.Most))
	return statusNotRun
}

type stub struct {
	client guestv1.PodClient
	stream guestv1.Pod_RunClient
	began  chan struct{} // closed when the process runs
}

// send sends a part of the input. The next Recv returns the error.
func (s *stub) send(r *guestv1.RunRequest) bool { return s.stream.Send(r) == nil }

// control passes on signals and the window's size, not in the stream: a process that does not read its input holds that up.
func (s *stub) control(ctx context.Context, signals <-chan os.Signal, terminal bool) {
	<-s.began
	tell := func(r *guestv1.ControlRequest) {
		r.Process = &guestv1.ControlRequest_ContainerId{ContainerId: os.Getenv("CRUST_CONTAINER")}
		if token := os.Getenv("CRUST_TOKEN"); token != "" {
			r.Process = &guestv1.ControlRequest_Token{Token: token}
		}
		_, _ = s.client.Control(ctx, r) // the process may have ended, which the stream shows
	}
	window := func() {
		if columns, rows, err := linux.Window(os.Stdin); err == nil {
			tell(&guestv1.ControlRequest{What: &guestv1.ControlRequest_Window{Window: &guestv1.WindowSize{
				Columns: uint32(columns), Rows: uint32(rows)}}})
		}
	}
	if terminal {
		window()
	}
	for got := range signals {
		if got == linux.WindowChange && terminal {
			window()
		} else if n := linux.SignalNumber(got); n != 0 {
			tell(&guestv1.ControlRequest{What: &guestv1.ControlRequest_Signal{Signal: uint32(n)}})
		}
	}
}

func (s *stub) input() {
	b := make([]byte, 32<<10)
	for {
		n, err := os.Stdin.Read(b)
		if n > 0 && !s.send(&guestv1.RunRequest{What: &guestv1.RunRequest_Stdin{Stdin: b[:n]}}) {
			return
		}
		if err != nil {
			s.send(&guestv1.RunRequest{What: &guestv1.RunRequest_EndOfStdin{EndOfStdin: true}})
			return
		}
	}
}

// output writes what the process writes, and returns its exit status.
func (s *stub) output() int {
	started := false
	for {
		r, err := s.stream.Recv()
		switch {
		case err != nil && started:
			if !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "the microVM of this pod has ended:", plain.Text(status.Convert(err).Message(), plain.Most))
			}
			return statusLost
		case err != nil:
			return tell(err)
		}
		switch what := r.GetWhat().(type) {
		case *guestv1.RunResponse_Started:
			if !started {
				close(s.began)
			}
			started = true
		case *guestv1.RunResponse_Stdout:
			// Whoever reads may have gone; the process goes on.
			_, _ = os.Stdout.Write(what.Stdout)
		case *guestv1.RunResponse_Stderr:
			_, _ = os.Stderr.Write(what.Stderr)
		case *guestv1.RunResponse_ExitStatus:
			if r.GetOutOfMemory() {
				exhaust()
			}
			return int(what.ExitStatus)
		}
	}
}
