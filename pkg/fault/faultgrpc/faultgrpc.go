// Package faultgrpc maps errors of pkg/fault to gRPC status codes, for servers whose methods
// return such errors.
package faultgrpc

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// most is the maximum length of an error's text, in bytes.
const most = 1 << 14

var kinds = map[fault.Kind]codes.Code{
	fault.Internal: codes.Internal, fault.Invalid: codes.InvalidArgument, fault.NotFound: codes.NotFound,
	fault.Exists: codes.AlreadyExists, fault.State: codes.FailedPrecondition, fault.NoSpace: codes.ResourceExhausted,
	fault.OutOfRange: codes.OutOfRange, fault.Busy: codes.Aborted, fault.Unavailable: codes.Unavailable,
	fault.Elsewhere: codes.ResourceExhausted,
}

// Status gives an error the gRPC code that the CSI specification prescribes. It sanitizes the
// text, because parts of it come from guests, file systems and programs. A gRPC status or a context
// error anywhere in the chain wins over the kind of a fault: wrap it with %v to hide it.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if st, ok := status.FromError(err); ok {
		if text := plain.Lines(st.Message(), most); text != st.Message() {
			return status.Error(st.Code(), text)
		}
		return err
	}
	text := plain.Lines(err.Error(), most)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, text)
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, text)
	}
	code, ok := kinds[fault.KindOf(err)]
	if !ok {
		code = codes.Internal
	}
	return status.Error(code, text)
}

// UnaryInterceptor applies Status to the error of a method.
func UnaryInterceptor(ctx context.Context, req any, _ *grpc.UnaryServerInfo, method grpc.UnaryHandler) (any, error) {
	resp, err := method(ctx, req)
	return resp, Status(err)
}

// StreamInterceptor applies Status to the error of a stream.
func StreamInterceptor(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, method grpc.StreamHandler) error {
	return Status(method(srv, s))
}
