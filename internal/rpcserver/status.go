package rpcserver

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

var kinds = map[fault.Kind]codes.Code{
	fault.Internal: codes.Internal, fault.Invalid: codes.InvalidArgument, fault.NotFound: codes.NotFound,
	fault.Exists: codes.AlreadyExists, fault.State: codes.FailedPrecondition, fault.NoSpace: codes.ResourceExhausted,
	fault.OutOfRange: codes.OutOfRange, fault.Busy: codes.Aborted,
}

// Status gives an error its gRPC code, as the CSI specification names them.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	}
	return status.Error(kinds[fault.KindOf(err)], err.Error())
}
