package rpcserver

import (
	"context"
	"time"

	"google.golang.org/grpc"
)

// StopTimeout is how long calls in flight may take after SIGTERM.
const StopTimeout = 20 * time.Second

// Stop lets calls in flight finish until ctx ends; then it cuts them off, which is as safe as a
// kill. It does not wait for calls that cannot be ended.
func Stop(ctx context.Context, s *grpc.Server) {
	done := make(chan struct{})
	go func() { s.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		s.Stop()
	}
}
