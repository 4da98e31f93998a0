package podguest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// take finds the process that the first message of a Run names.
func (s *Server) take(r *guestv1.RunRequest) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.containers[r.GetContainerId()]
	if token := r.GetToken(); token != "" {
		p = s.prepared[token]
		delete(s.prepared, token)
	}
	if p == nil {
		return nil, fault.New(fault.NotFound, "there is no such process")
	}
	if p.begun {
		return nil, fault.New(fault.State, "container %s was started before", p.container)
	}
	p.begun = true
	return p, nil
}

// key names a process as Run and Control are given it.
func key(container, token string) string { return container + "/" + token }

// runs lets Control find a process, until the result is called.
func (s *Server) runs(r *guestv1.RunRequest, p *process) (ended func()) {
	k := key(r.GetContainerId(), r.GetToken())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[k] = p
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.running, k)
	}
}

// Control sends a signal to a process, or sets the size of its terminal.
func (s *Server) Control(_ context.Context, r *guestv1.ControlRequest) (*guestv1.ControlResponse, error) {
	s.mu.Lock()
	p := s.running[key(r.GetContainerId(), r.GetToken())]
	s.mu.Unlock()
	if p == nil {
		return nil, fault.New(fault.NotFound, "no such process runs")
	}
	switch what := r.GetWhat().(type) {
	case *guestv1.ControlRequest_Signal:
		p.signal(int(what.Signal))
	case *guestv1.ControlRequest_Window:
		if p.terminal {
			// The next size may fit.
			_ = linux.SetWindow(p.stdin, uint16(what.Window.GetColumns()), uint16(what.Window.GetRows()))
		}
	}
	return &guestv1.ControlResponse{}, nil
}

// sending sends from several goroutines.
type sending struct {
	sync.Mutex
	stream guestv1.Pod_RunServer
}

func (s *sending) send(r *guestv1.RunResponse) error {
	s.Lock()
	defer s.Unlock()
	return s.stream.Send(r)
}

// Run starts a process and carries its streams. If the stream breaks, the process is killed: nobody would see its end.
func (s *Server) Run(stream guestv1.Pod_RunServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	p, err := s.take(first)
	if err != nil {
		return err
	}
	if err := p.start(stream.Context()); err != nil {
		p.close()
		if p.found != nil {
			p.signal(killed) // the stream broke just now
			go p.wait()
		}
		if p.further {
			err = errors.Join(err, removeFiles(p.dir))
		}
		return err
	}
	defer s.runs(first, p)()
	out := &sending{stream: stream}
	stop := context.AfterFunc(stream.Context(), func() { p.signal(killed) })
	defer stop()
	if err := out.send(&guestv1.RunResponse{What: &guestv1.RunResponse_Started{Started: true}}); err != nil {
		p.signal(killed) // wait, below, reaps it
	}
	go p.receive(stream)
	read := newActivity()
	var copies sync.WaitGroup
	for i, f := range p.out {
		copies.Go(func() { p.forward(out, f, i == 1, read) })
	}
	status := p.wait()
	starved := !p.further && status == 128+killed && outOfMemory(p.container)
	if p.joined {
		if err := p.killRest(); err != nil {
			fmt.Println("crust-guest: what container", p.container, "left behind:", err)
		}
	}
	p.end(&copies, read)
	p.close()
	if p.further {
		if err := removeFiles(p.dir); err != nil {
			return err
		}
	}
	return out.send(&guestv1.RunResponse{What: &guestv1.RunResponse_ExitStatus{ExitStatus: int32(status)}, OutOfMemory: starved})
}

const killed = 9 // SIGKILL

// outOfMemory tells whether the kernel killed a process of a container because its memory was used up, cgroups(7).
func outOfMemory(container string) bool {
	b, err := os.ReadFile(filepath.Join(cgroups, container, "memory.events"))
	return err == nil && killsIn(string(b)) > 0
}

// killsIn returns the number of such kills in the text of memory.events.
func killsIn(events string) (n int) {
	for line := range strings.Lines(events) {
		if text, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ = strconv.Atoi(strings.TrimSpace(text)) // 0 if it is no number
		}
	}
	return n
}

// receive passes on input.
func (p *process) receive(stream guestv1.Pod_RunServer) {
	for {
		r, err := stream.Recv()
		if err != nil {
			return
		}
		switch what := r.GetWhat().(type) {
		case *guestv1.RunRequest_Stdin:
			// An error means that it has ended, or has closed its input.
			_, _ = p.stdin.Write(what.Stdin)
		case *guestv1.RunRequest_EndOfStdin:
			if !p.terminal {
				p.stdin.Close()
			}
		}
	}
}

// forward sends what the process writes, until its end.
func (p *process) forward(to *sending, from *os.File, standardError bool, read *activity) {
	const piece = 32 << 10
	b := make([]byte, piece)
	for {
		n, err := from.Read(b)
		if n > 0 {
			r := &guestv1.RunResponse{What: &guestv1.RunResponse_Stdout{Stdout: b[:n]}}
			if standardError {
				r.What = &guestv1.RunResponse_Stderr{Stderr: b[:n]}
			}
			read.begin()
			err := to.send(r)
			read.end()
			if err != nil {
				return
			}
		}
		if err != nil { // a terminal's end is EIO
			return
		}
	}
}

// end waits until all that was written has been sent. A further process may leave others behind that keep its output open; if
// nothing came for a second, end does not wait for them.
func (p *process) end(copies *sync.WaitGroup, read *activity) {
	done := make(chan struct{})
	go func() { copies.Wait(); close(done) }()
	patience := time.Second
	if !p.further {
		patience = 10 * time.Second // only another container can have it open: with it, the processes of this one have ended
	}
	for {
		select {
		case <-done:
			return
		case <-time.After(time.Second):
			if read.since() >= patience {
				return
			}
		}
	}
}

// activity tells when something last happened.
type activity struct {
	sync.Mutex
	last  time.Time
	going int // what happens just now: it may wait for whoever reads
}

func newActivity() *activity { return &activity{last: time.Now()} }

func (a *activity) note() { a.Lock(); a.last = time.Now(); a.Unlock() }

func (a *activity) begin() { a.Lock(); a.going++; a.Unlock() }

func (a *activity) end() { a.Lock(); a.going--; a.last = time.Now(); a.Unlock() }

func (a *activity) since() time.Duration {
	a.Lock()
	defer a.Unlock()
	if a.going > 0 {
		return 0
	}
	return time.Since(a.last)
}
