package driver

import (
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A scrape of the metrics hangs on no disk, and many scrapes make no more looks than one.
func TestMonitoring_AScrapeWaitsForNoSickDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c conditions
		var looks atomic.Int32
		answer := make(chan struct{})
		sick := []Unhealthy{{"v", "DeviceUnreadable", "inaccessible"}}
		look := func() []Unhealthy { looks.Add(1); <-answer; return sick }
		for range 3 {
			begin := time.Now()
			if got := c.latest(look); got != nil {
				t.Errorf("before the look has ended: %v", got)
			}
			if took := time.Since(begin); took > lookPatience {
				t.Errorf("a scrape waited for %s", took)
			}
		}
		close(answer)
		synctest.Wait()
		if got := c.latest(look); !slices.Equal(got, sick) || looks.Load() != 1 {
			t.Errorf("after %d looks: %v", looks.Load(), got)
		}
		time.Sleep(lookAgain)
		sick = nil
		if got := c.latest(look); len(got) != 0 || looks.Load() != 2 {
			t.Errorf("later, after %d looks: %v", looks.Load(), got)
		}
	})
}

// Growth waits until it was made, or less was asked for.
func TestMonitoring_RefusedGrowthIsKnownUntilItIsMade(t *testing.T) {
	var g refusedGrowth
	g.note("b", nil)
	g.note("b", fault.New(fault.NoSpace, "full"))
	g.note("a", fault.New(fault.NoSpace, "full"))
	g.note("a", fault.New(fault.Busy, "later")) // tells nothing of the room
	g.note("c", fault.New(fault.Busy, "later"))
	if got := g.all(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("waiting: %v", got)
	}
	g.note("a", nil)
	if got := g.all(); !slices.Equal(got, []string{"b"}) {
		t.Errorf("waiting after one was made: %v", got)
	}
}
