package rpcserver

import (
	"hash/maphash"
	"sync"
	"time"
)

// repeats remembers recently logged errors. Orchestrators retry a refused call several times a
// minute, for each volume. The log shows the first error, and then one line in ten minutes with the
// number of omitted calls. A successful call ends it.
type repeats struct {
	mu     sync.Mutex
	seed   maphash.Seed
	said   map[uint64]map[uint64]*repeat // by call, and by error
	errors int
}

type repeat struct {
	at    time.Time // of the last line
	since int       // calls since that line
}

const (
	repeatAfter = 10 * time.Minute
	mostRepeats = 1024 // callers choose names, so the map is cleared at this size
)

// call identifies a call by its method and object.
func (r *repeats) call(parts ...string) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.said == nil || r.errors >= mostRepeats {
		r.said, r.errors, r.seed = map[uint64]map[uint64]*repeat{}, 0, maphash.MakeSeed()
	}
	var h maphash.Hash
	h.SetSeed(r.seed)
	for _, p := range parts {
		_, _ = h.WriteString(p)
		_ = h.WriteByte(0)
	}
	return h.Sum64()
}

// again reports whether to log this error of a call now, and how many equal errors were omitted
// since the last line.
func (r *repeats) again(now time.Time, call uint64, err string) (loud bool, unsaid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.said[call] == nil {
		r.said[call] = map[uint64]*repeat{}
	}
	key := maphash.String(r.seed, err)
	seen := r.said[call][key]
	switch {
	case seen == nil:
		r.said[call][key] = &repeat{at: now}
		r.errors++
		return true, 0
	case now.Sub(seen.at) < repeatAfter:
		seen.since++
		return false, 0
	}
	unsaid = seen.since
	seen.at, seen.since = now, 0
	return true, unsaid
}

// over forgets the errors of a call that succeeded.
func (r *repeats) over(call uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errors -= len(r.said[call])
	delete(r.said, call)
}
