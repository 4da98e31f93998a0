package rpcserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
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

// ServeHTTP serves metrics and health at --metrics-address until it is closed;
// nothing where that is empty. What ends it otherwise is sent to failed.
func ServeHTTP(address string, h http.Handler, failed chan<- error) (closer func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--metrics-address: %w", err)
	}
	s := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: h}
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			failed <- err
		}
	}()
	return func() { _ = s.Close() }, nil // the listener is gone either way
}
