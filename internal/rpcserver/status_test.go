package rpcserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// What a guest or a file system said reaches callers, and so events and terminals,
// as plain text, whatever kind of error carries it.
func TestALow_ErrorsArePlainText(t *testing.T) {
	const hostile = "label \x1b[2J\u202egnp\xff"
	for name, c := range map[string]struct {
		err  error
		code codes.Code
	}{
		"a fault":      {fault.New(fault.State, "volume x: %s", hostile), codes.FailedPrecondition},
		"a status":     {status.Error(codes.NotFound, hostile), codes.NotFound},
		"something":    {errors.New(hostile), codes.Internal},
		"a long story": {fault.New(fault.Invalid, "%s", strings.Repeat("\x1b", 1<<20)), codes.InvalidArgument},
	} {
		got := Status(c.err)
		text := status.Convert(got).Message()
		if status.Code(got) != c.code || strings.ContainsAny(text, "\x1b\u202e") || !utf8.ValidString(text) || len(text) > 1<<15 || !strings.Contains(text, `\x1b`) {
			t.Errorf("%s: %s %.200q", name, status.Code(got), text)
		}
	}
}

type counted []string

func (c *counted) Started(string) func(string) { return func(code string) { *c = append(*c, code) } }

// A call that another node has to answer has the code of a full pool, and is not counted as one.
func TestMonitoring_AWrongNodeIsNoFullPool(t *testing.T) {
	var c counted
	i := &interceptor{log: slog.New(slog.DiscardHandler), metrics: &c}
	for _, kind := range []fault.Kind{fault.NoSpace, fault.Elsewhere} {
		_, err := i.unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/csi/CreateVolume"}, func(context.Context, any) (any, error) {
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
