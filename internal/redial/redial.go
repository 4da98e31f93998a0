// Package redial sets how soon a gRPC client of a local socket reconnects. The default waits up to
// two minutes: a client that others call all the time would be unavailable that long after its
// server is back.
package redial

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Longest is the maximum pause between two attempts, before jitter.
const Longest = time.Second

// Soon makes a client reconnect after a twentieth of a second, and later after Longest.
func Soon() grpc.DialOption {
	return grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: Longest},
		MinConnectTimeout: 5 * time.Second,
	})
}
