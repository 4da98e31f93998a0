package driver

import (
	"sync"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// lostWrites remembers which staged volumes lost writes, and how: the kernel
// tells once, and a full pool that has room again makes nothing good.
type lostWrites struct {
	mu sync.Mutex
	m  map[string]string
}

func (l *lostWrites) note(id string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m == nil {
		l.m = map[string]string{}
	}
	l.m[id] = err.Error()
}

func (l *lostWrites) forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, id)
}

func (l *lostWrites) of(id string) []mounter.Ailment {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m[id] == "" {
		return nil
	}
	return []mounter.Ailment{{
		Reason: "WritesLost", Fatal: true, Lost: true,
		Message: "writes to the volume's device failed, and what was written is lost: " + l.m[id] +
			"; make room in the pool, stop the pods, check the data; this is forgotten when the volume is unstaged",
	}}
}

// crowded tells whether the pool was found (nearly) full: that is when writes
// of thin volumes fail, and when it is worth the time to write one out.
func crowded(found []mounter.Ailment) bool {
	for _, a := range found {
		if a.Reason == "PoolFull" || a.Reason == "PoolNearlyFull" {
			return true
		}
	}
	return false
}
