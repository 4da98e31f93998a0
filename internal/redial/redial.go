// Package redial says how soon a gRPC client of a local socket tries again. The default waits up to two minutes: a
// client that others call all the time would stay deaf so long after its server is back.
package redial

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Longest is the pause between two attempts, but for what chance adds to it.
const Longest = time.Second

// Soon has a client try again after a twentieth of a second, and after Longest at last.
func Soon() grpc.DialOption {
	return grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: Longest}, MinConnectTimeout: 5 * time.Second,
	})
}
