package orchestrator

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A driver's error passes unchanged, with its details, whatever a handler adds. Other errors have codes too.
func TestErrorsPassThroughTheProxy(t *testing.T) {
	const text = "busy:\r\nwith what"
	with, err := status.New(codes.Aborted, text).WithDetails(wrapperspb.String("why"))
	ok(t, err)
	for _, in := range []error{with.Err(), fmt.Errorf("of a handler: %w", with.Err()), errors.Join(with.Err(), errors.New("a header"))} {
		got := status.Convert(asItIs(in))
		if got.Code() != codes.Aborted || got.Message() != text || len(got.Details()) != 1 {
			t.Errorf("%v passes as %v with %v", in, got, got.Details())
		}
	}
	if got := status.Code(asItIs(fault.New(fault.NoSpace, "full"))); got != codes.ResourceExhausted {
		t.Errorf("a full pool is %s", got)
	}
	if got := status.Code(asItIs(errors.New("broken"))); got != codes.Internal {
		t.Errorf("an error of no kind is %s", got)
	}
}
