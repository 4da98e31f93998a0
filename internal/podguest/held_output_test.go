package podguest

import (
	"os"
	"sync"
	"testing"
	"time"
)

// With shareProcessNamespace, another container may have opened /proc/PID/fd/1 of one that has ended: its end is told nevertheless.
func TestC24_AnOutputThatAnotherContainerHasOpen(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close() // the other container's
	p := &process{out: []*os.File{r}}
	s := &stalled{gate: make(chan struct{})}
	close(s.gate)
	read, out := newActivity(), &sending{stream: s}
	var copies sync.WaitGroup
	copies.Go(func() { p.forward(out, r, false, read) })
	ended := make(chan struct{})
	go func() { p.end(&copies, read); close(ended) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the end of the container's first process is not told")
	}
	p.close()
}
