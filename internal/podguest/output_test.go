package podguest

import (
	"bytes"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// stalled is a stub whose reader pauses once.
type stalled struct {
	grpc.ServerStream
	mu   sync.Mutex
	got  bytes.Buffer
	gate chan struct{}
}

func (s *stalled) Recv() (*guestv1.RunRequest, error) { select {} }

func (s *stalled) Send(r *guestv1.RunResponse) error {
	<-s.gate
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got.Write(r.GetStdout())
	return nil
}

// kubectl exec POD -- cat FILE | slow: all that the command wrote arrives, even if its reader pauses.
func TestC24_ACommandsOutputWaitsForItsReader(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	const size = 60 << 10
	if _, err := w.Write(make([]byte, size)); err != nil { // fits the pipe: the process ends
		t.Fatal(err)
	}
	w.Close()
	p := &process{further: true, out: []*os.File{r}}
	s := &stalled{gate: make(chan struct{})}
	time.AfterFunc(3*time.Second, func() { close(s.gate) })
	// As in Run:
	read, out := newActivity(), &sending{stream: s}
	var copies sync.WaitGroup
	copies.Go(func() { p.forward(out, r, false, read) })
	p.end(&copies, read)
	p.close()
	_ = out.send(&guestv1.RunResponse{What: &guestv1.RunResponse_ExitStatus{}})
	copies.Wait()
	if s.got.Len() != size {
		t.Errorf("%d of %d bytes arrived, and exit status 0", s.got.Len(), size)
	}
}

// A command whose crust-oci was killed before its stub ran leaves nothing for the container's life.
func TestC24_APreparedCommandThatNobodyRuns(t *testing.T) {
	s := &Server{containers: map[string]*process{}, prepared: map[string]*process{}, running: map[string]*process{}}
	s.containers["one"] = &process{container: "one", dir: t.TempDir()}
	prepare := func() string {
		r, err := s.PrepareProcess(t.Context(), &guestv1.PrepareProcessRequest{ContainerId: "one", Process: []byte(`{"args":["x"]}`)})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetToken()
	}
	old, young := prepare(), prepare()
	s.prepared[old].prepared = time.Now().Add(-unused - time.Second)
	third := prepare()
	names, err := os.ReadDir(s.containers["one"].dir)
	if err != nil || len(names) != 2 || s.prepared[old] != nil || s.prepared[young] == nil || s.prepared[third] == nil {
		t.Errorf("%d prepared, %d directories, %v", len(s.prepared), len(names), err)
	}
}

// What several containers have is forgotten with the last of them.
func TestC24_WhatContainersHaveInCommonIsForgottenLast(t *testing.T) {
	const mounts = `1 0 0:1 / / rw - tmpfs none rw
2 1 0:2 / /run/crust/shared ro - virtiofs pod rw
3 2 0:3 / /run/crust/shared/one/rootfs rw - virtiofs none rw
4 2 0:4 / /run/crust/shared/two/rootfs rw - virtiofs none rw
5 2 0:5 / /run/crust/shared/~common/used rw - virtiofs none rw
6 5 0:6 / /run/crust/shared/~common/used/below rw - virtiofs none rw
7 2 0:7 / /run/crust/shared/~common/unused rw - virtiofs none rw
8 7 0:8 / /run/crust/shared/~common/unused/be\040low rw - virtiofs none rw
`
	got := forgettable(mounts, "one", map[string]bool{"used": true})
	want := []string{Shared + "/one/rootfs", Shared + "/~common/unused", Shared + "/~common/unused/be low"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
