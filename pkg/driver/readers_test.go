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

// TestD11_ALookThatHangs: a look at a volume that does not return is abandoned by its caller, and
// keeps other looks from hanging as well.
func TestD11_ALookThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReaders(slog.New(slog.DiscardHandler))
		answer := make(chan struct{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		// Two at once, one of which returns.
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
		if err := r.look(context.Background(), ofVolume("v"), func() error { return nil }); !errors.Is(err, errNoAnswer) ||
			!fault.Is(err, fault.Busy) {
			t.Errorf("another look, later: %v", err)
		}
		if err := r.look(context.Background(), ofVolume("w"), func() error { return nil }); err != nil {
			t.Errorf("another volume: %v", err)
		}
		done := r.exclude("v", "unstaged") // waits for readerPatience at most
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

// TestD11_AFlushThatTakesLongIsNoSickDisk: health writes out a volume of a crowded pool. Gigabytes
// take minutes. Other callers learn that, not that the volume does not answer.
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

// A12: who takes a volume away waits for those that look at it, and they wait for it. A look that hangs holds nobody up
// for ever.
func TestA12_TakingAVolumeAwayAndLookingExcludeEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReaders(slog.New(slog.DiscardHandler))
		begun := time.Now()
		const look = time.Second
		looked := make(chan error)
		go func() {
			looked <- r.look(context.Background(), ofVolume("v"), func() error { time.Sleep(look); return nil })
		}()
		synctest.Wait()
		done := r.exclude("v", "being unstaged")
		if waited := time.Since(begun); waited != look {
			t.Errorf("it was taken away after %v, and a look took %v", waited, look)
		}
		if err := <-looked; err != nil {
			t.Error(err)
		}
		go func() { looked <- r.look(context.Background(), ofVolume("v"), func() error { return nil }) }()
		synctest.Wait()
		select {
		case err := <-looked:
			t.Errorf("a look began while the volume was being taken away: %v", err)
		default:
		}
		time.Sleep(shutPatience / 2)
		done()
		if err := <-looked; err != nil {
			t.Error(err)
		}

		never := make(chan struct{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		go func() { looked <- r.look(ctx, ofVolume("v"), func() error { <-never; return nil }) }()
		synctest.Wait()
		begun = time.Now()
		r.exclude("v", "being unstaged")()
		if waited := time.Since(begun); waited != readerPatience {
			t.Errorf("a look that hangs held it up for %v", waited)
		}
		close(never)
		<-looked
	})
}
