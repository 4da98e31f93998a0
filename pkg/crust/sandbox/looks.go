package sandbox

import (
	"slices"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// looks are the running calls of Sandbox.Stats. What bounds a call does not bound the kernel: a look at a volume whose disk hangs keeps its
// thread for as long as the disk hangs, and a kubelet looks every minute.
type looks struct {
	mu    sync.Mutex
	began map[string][]time.Time // by volume, the oldest first
}

// enter refuses a look at a volume while another one takes longer than patience. The caller calls leave when it has looked.
func (l *looks) enter(of string, patience time.Duration) (leave func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if running := l.began[of]; len(running) > 0 && now.Sub(running[0]) > patience {
		return nil, fault.New(fault.Unavailable, "%s has not answered since %s, so its disk or server hangs: see the kernel's log (dmesg)",
			of, running[0].UTC().Format(time.RFC3339))
	}
	if l.began == nil {
		l.began = map[string][]time.Time{}
	}
	l.began[of] = append(l.began[of], now)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		running := l.began[of]
		if i := slices.Index(running, now); i >= 0 {
			running = slices.Delete(running, i, i+1)
		}
		if l.began[of] = running; len(running) == 0 {
			delete(l.began, of)
		}
	}, nil
}
