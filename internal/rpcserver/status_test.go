package rpcserver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

type counted []string

func (c *counted) Started(string) func(string) { return func(code string) { *c = append(*c, code) } }

// A call for another node has the code of a full pool, but is not counted as one.
func TestMonitoring_AWrongNodeIsNoFullPool(t *testing.T) {
	var c counted
	i := &interceptor{log: slog.New(slog.DiscardHandler), metrics: &c}
	for _, kind := range []fault.Kind{fault.NoSpace, fault.Elsewhere} {
		_, err := i.unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/csi/CreateVolume"},
			func(context.Context, any) (any, error) {
				return nil, fmt.Errorf("volume x: %w", fault.New(kind, "no"))
			})
		if status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if !slices.Equal(c, counted{"ResourceExhausted", "Elsewhere"}) {
		t.Errorf("counted: %v", c)
	}
}
