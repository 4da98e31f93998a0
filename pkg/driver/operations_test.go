package driver

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func TestANextCallDoesNotMeetAnAnsweredOne(t *testing.T) {
	o := newOperations(slog.New(slog.DiscardHandler))
	nothing := func(context.Context, *volume.Progress) error { return nil }
	for range 10000 {
		if err := o.long(t.Context(), "first", nothing, "v"); err != nil {
			t.Fatal(err)
		}
		if err := o.short("second", func() error { return nil }, "v"); err != nil {
			t.Fatalf("the first call was answered, and the second met it: %v", err)
		}
	}
}

func TestACallOnABusyVolumeIsAborted(t *testing.T) {
	o := newOperations(slog.New(slog.DiscardHandler))
	err := o.short("outer", func() error {
		if err := o.short("other volume", func() error { return nil }, "w"); err != nil {
			t.Errorf("calls on different volumes met: %v", err)
		}
		return o.short("inner", func() error { return nil }, "v")
	}, "v")
	if !fault.Is(err, fault.Busy) {
		t.Fatalf("got %v, want Busy", err)
	}
}

func TestAPanicInALongCallFreesTheVolume(t *testing.T) {
	o := newOperations(slog.New(slog.DiscardHandler))
	err := o.long(t.Context(), "first", func(context.Context, *volume.Progress) error { panic("bug") }, "v")
	if err == nil {
		t.Fatal("the panic was lost")
	}
	if err := o.short("second", func() error { return nil }, "v"); err != nil {
		t.Fatal(err)
	}
}

func TestWorkersAreFewAndEndWithTheDriver(t *testing.T) {
	before := runtime.NumGoroutine()
	more := func() int { return runtime.NumGoroutine() - before }
	o := newOperations(slog.New(slog.DiscardHandler))
	var calls sync.WaitGroup
	arrived, leave := make(chan struct{}), make(chan struct{})
	const many = 4 * idleWorkers
	for i := range many {
		calls.Go(func() {
			if err := o.long(t.Context(), "call", func(context.Context, *volume.Progress) error {
				arrived <- struct{}{}
				<-leave
				return nil
			}, fmt.Sprint(i)); err != nil {
				t.Error(err)
			}
		})
	}
	for range many { // all run beside each other
		<-arrived
	}
	close(leave)
	calls.Wait()
	for end := time.Now().Add(time.Minute); more() > idleWorkers; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines are left", more())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	o.drain(ctx)
	for end := time.Now().Add(time.Minute); more() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines are left after the end", more())
		}
	}
}
