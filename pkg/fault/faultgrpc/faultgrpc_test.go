package faultgrpc_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

// Text from a guest or a file system reaches callers, and so events and terminals, only as
// plain text, whatever kind of error carries it.
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
		got := faultgrpc.Status(c.err)
		text := status.Convert(got).Message()
		if status.Code(got) != c.code || strings.ContainsAny(text, "\x1b\u202e") || !utf8.ValidString(text) ||
			len(text) > 1<<15 || !strings.Contains(text, `\x1b`) {
			t.Errorf("%s: %s %.200q", name, status.Code(got), text)
		}
	}
}

// A failed method never looks successful, not even for an unknown kind.
func TestAnErrorIsNeverOK(t *testing.T) {
	for kind := range fault.Elsewhere + 90 {
		err := faultgrpc.Status(fault.New(kind, "volume x"))
		if err == nil || status.Code(err) == codes.OK || status.Code(err) == codes.Unknown {
			t.Errorf("%s has the status %v", kind, err)
		}
	}
}

func TestInterceptorsGiveErrorsTheirCodes(t *testing.T) {
	failed := fault.New(fault.State, "volume x is in use")
	for name, call := range map[string]func(error) error{
		"a call": func(err error) error {
			_, err = faultgrpc.UnaryInterceptor(t.Context(), nil, nil, func(context.Context, any) (any, error) { return nil, err })
			return err
		},
		"a stream": func(err error) error {
			return faultgrpc.StreamInterceptor(nil, nil, nil, func(any, grpc.ServerStream) error { return err })
		},
	} {
		if err := call(failed); status.Code(err) != codes.FailedPrecondition || status.Convert(err).Message() != failed.Error() {
			t.Errorf("%s that failed has the status %v", name, err)
		}
		if err := call(nil); err != nil {
			t.Errorf("%s that worked has the status %v", name, err)
		}
	}
}
