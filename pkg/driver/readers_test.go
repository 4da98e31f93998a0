package driver

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// TestD11_ALookThatHangs: one look at a volume that does not come back is left by
// its caller, and keeps others of that volume from hanging as well.
func TestD11_ALookThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReaders(slog.New(slog.DiscardHandler))
		answer := make(chan struct{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		// Two at once, of which one comes back.
		one := make(chan struct{})
		both := make(chan error, 2)
		for _, wait := range []chan struct{}{answer, one} {
			go func() { both <- r.look(ctx, ofVolume("v"), func() error { <-wait; return nil }) }()
		}
		for range cap(both) {
			if <-both == nil {
				t.Fatal("a look that hangs has come back")
			}
		}
		close(one)
		synctest.Wait()
		err := r.look(context.Background(), ofVolume("v"), func() error { t.Error("another look at it begins"); return nil })
		if !fault.Is(err, fault.Busy) || errors.Is(err, errNoAnswer) {
			t.Errorf("another look: %v", err)
		}
		time.Sleep(2 * readerPatience)
		if err := r.look(context.Background(), ofVolume("v"), func() error { return nil }); !errors.Is(err, errNoAnswer) || !fault.Is(err, fault.Busy) {
			t.Errorf("another look, later: %v", err)
		}
		if err := r.look(context.Background(), ofVolume("w"), func() error { return nil }); err != nil {
			t.Errorf("another volume: %v", err)
		}
		done := r.exclude("v", "unstaged") // patient, and no longer than that
		done()
		close(answer)
		synctest.Wait()
		if err := r.look(context.Background(), ofVolume("v"), func() error { return nil }); err != nil {
			t.Errorf("after it came back: %v", err)
		}
		if err := r.look(context.Background(), ofVolume("v"), func() error { panic("boo") }); err == nil {
			t.Error("a panic is no error")
		}
		if len(r.m) != 0 {
			t.Errorf("left: %v", r.m)
		}
	})
}

// TestD11_AFlushThatTakesLongIsNoSickDisk: health writes a volume of a crowded pool out. Gigabytes take minutes, and who
// looks meanwhile is told that, and not that the volume does not answer.
func TestD11_AFlushThatTakesLongIsNoSickDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReaders(slog.New(slog.DiscardHandler))
		written := make(chan struct{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := r.look(ctx, ofVolume("v"), func() error {
			done := r.writing(ofVolume("v"))
			defer done()
			<-written
			return nil
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("its caller has left: %v", err)
		}
		for range 3 {
			err := r.look(context.Background(), ofVolume("v"), func() error { t.Error("another look at it begins"); return nil })
			if !errors.Is(err, errWriting) || errors.Is(err, errNoAnswer) || !fault.Is(err, fault.Busy) {
				t.Errorf("another look: %v", err)
			}
			time.Sleep(2 * readerPatience)
		}
		close(written)
		synctest.Wait()
		if err := r.look(context.Background(), ofVolume("v"), func() error { return nil }); err != nil || len(r.m) != 0 {
			t.Errorf("afterwards: %v %v", err, r.m)
		}
	})
}
