package faultgrpc_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
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
		got := faultgrpc.Status(c.err)
		text := status.Convert(got).Message()
		if status.Code(got) != c.code || strings.ContainsAny(text, "\x1b\u202e") || !utf8.ValidString(text) || len(text) > 1<<15 || !strings.Contains(text, `\x1b`) {
			t.Errorf("%s: %s %.200q", name, status.Code(got), text)
		}
	}
}
