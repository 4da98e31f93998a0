package keylock

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestD06_LocksAreOfOneKey(t *testing.T) {
	var l Locks[string]
	unlock := l.Lock("a")
	other := make(chan struct{})
	go func() { l.Lock("b")(); close(other) }()
	select {
	case <-other:
	case <-time.After(time.Minute):
		t.Fatal("another key's lock is not had")
	}
	var waiting sync.WaitGroup
	var inside atomic.Int32
	for range 20 {
		waiting.Go(func() {
			defer l.Lock("a")()
			if inside.Add(1) > 1 {
				t.Error("two have the lock")
			}
			time.Sleep(time.Millisecond)
			inside.Add(-1)
		})
	}
	unlock()
	waiting.Wait()
	if len(l.held) != 0 {
		t.Errorf("left: %v", l.held)
	}
}
