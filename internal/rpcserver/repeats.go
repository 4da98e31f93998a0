package rpcserver

import (
	"hash/maphash"
	"sync"
	"time"
)

// repeats knows which errors the log has had lately. Orchestrators repeat a call that
// was refused for as long as it is wanted, some times a minute, for each of its
// volumes: the log has the first, and one now and then with their number.
type repeats struct {
	mu   sync.Mutex
	seed maphash.Seed
	said map[uint64]*repeat
}

type repeat struct {
	at    time.Time // of the last line
	since int       // calls
}

const (
	repeatAfter = 10 * time.Minute
	mostRepeats = 1024 // then all are forgotten: callers choose them
)

// again tells whether an error is to be logged now, and how many like it were not
// since the last line.
func (r *repeats) again(now time.Time, parts ...string) (loud bool, unsaid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.said) >= mostRepeats || r.said == nil {
		r.said = map[uint64]*repeat{}
		r.seed = maphash.MakeSeed()
	}
	var h maphash.Hash
	h.SetSeed(r.seed)
	for _, p := range parts {
		_, _ = h.WriteString(p)
		_ = h.WriteByte(0)
	}
	seen := r.said[h.Sum64()]
	switch {
	case seen == nil:
		r.said[h.Sum64()] = &repeat{at: now}
		return true, 0
	case now.Sub(seen.at) < repeatAfter:
		seen.since++
		return false, 0
	}
	unsaid = seen.since
	seen.at, seen.since = now, 0
	return true, unsaid
}
