package rpcserver

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// MetricsConnections is the maximum number of connections to the port of metrics and health. It is
// far below the usual limit of descriptors (1024), which calls need too.
const MetricsConnections = 64

// ServeHTTP serves metrics and health at --metrics-address until it is closed; an empty address
// disables it. Any other end is sent to failed. Clients of the port cannot exhaust the daemon:
// connections are few, and short.
func ServeHTTP(address string, h http.Handler, failed chan<- error) (closer func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	address, err = listenAddress(address)
	if err != nil {
		return nil, fmt.Errorf("--metrics-address: %w", err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--metrics-address: %w", err)
	}
	open := &connections{most: MetricsConnections}
	s := &http.Server{
		Handler: h, ConnState: open.changed, MaxHeaderBytes: 16 << 10,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
	}
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			failed <- err
		}
	}()
	return func() { _ = s.Close() }, nil // the listener is gone either way
}

// listenAddress reads HOST:PORT. Without a host it means only this machine; all interfaces must be
// requested with "*".
func listenAddress(address string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if host == "*" {
		return net.JoinHostPort("", port), err
	}
	return net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port), err
}

// connections limits their number. A new connection closes the oldest and does not wait: otherwise
// a client that holds many would block the kubelet's probes.
type connections struct {
	most int
	mu   sync.Mutex
	open []net.Conn // oldest first
}

func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		c.open = append(c.open, conn)
		if len(c.open) > c.most {
			c.open[0].Close()
			c.open = slices.Delete(c.open, 0, 1)
		}
	case http.StateClosed, http.StateHijacked:
		c.open = slices.DeleteFunc(c.open, func(o net.Conn) bool { return o == conn })
	}
}
