package rpcserver

import (
	"context"
	"time"

	"google.golang.org/grpc"
)

// StopTimeout is how long calls in flight may take after SIGTERM.
const StopTimeout = 20 * time.Second

// Stop lets calls in flight end until ctx does; then they are cut off, which they
// survive like a kill. Those that cannot be ended are not waited for.
func Stop(ctx context.Context, s *grpc.Server) {
	done := make(chan struct{})
	go func() { s.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		s.Stop()
	}
}
