// Package paced reads what an untrusted peer sends at a limited rate. What the peer sends beyond that waits in the peer.
package paced

import (
	"io"
	"time"

	"golang.org/x/time/rate"
)

// Reader reads from R, no faster than Limit.
type Reader struct {
	R     io.Reader
	Limit *rate.Limiter // of bytes
}

// Read waits, after it has read, for as long as the limit demands.
func (r Reader) Read(p []byte) (int, error) {
	n, err := r.R.Read(p[:min(len(p), r.Limit.Burst())])
	time.Sleep(r.Limit.ReserveN(time.Now(), n).Delay())
	return n, err
}
