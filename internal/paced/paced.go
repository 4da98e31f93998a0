// Package paced reads what an untrusted peer sends at a limited rate. What the peer sends beyond that waits in the peer.
package paced

import (
	"io"
	"time"

	"golang.org/x/time/rate"
)

// Reader reads from R.
type Reader struct {
	R     io.Reader
	Limit *rate.Limiter // of bytes
}

// Read returns after the bytes that it has read have had their time.
func (r Reader) Read(p []byte) (int, error) {
	n, err := r.R.Read(p[:min(len(p), r.Limit.Burst())])
	time.Sleep(r.Limit.ReserveN(time.Now(), n).Delay())
	return n, err
}
