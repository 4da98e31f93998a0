package orchestrator

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/redial"
)

// message is one as it is on the wire.
type message struct{ bytes []byte }

// wire hands messages on without looking into them.
type wire struct{}

var _ encoding.CodecV2 = wire{}

// Name is that of protobuf, which the messages are for both ends.
func (wire) Name() string { return "proto" }

func (wire) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(*message)
	if !ok {
		return nil, fmt.Errorf("a %T is not forwarded", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(m.bytes)}, nil
}

func (wire) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*message)
	if !ok {
		return fmt.Errorf("a %T is not forwarded", v)
	}
	m.bytes = data.Materialize()
	return nil
}

// Call forwards a request's bytes and gives those of the answer.
type Call func(ctx context.Context, request []byte) ([]byte, error)

// Handler stands in for a method. It calls next with what the driver is to get,
// or does not.
type Handler func(ctx context.Context, request []byte, next Call) ([]byte, error)

// Proxy forwards calls to a driver: methods and fields that it does not know
// too, with their metadata and deadlines, and the driver's errors as they are.
// Methods with streams, which CSI drivers do not have on their node's socket, are
// refused.
type Proxy struct {
	Driver   grpc.ClientConnInterface
	Handlers map[string]Handler // by the method's full name
}

// window of gRPC's flow control, in bytes. A fixed one spares the measurements by
// which it would be chosen, and with them a packet each way for most calls.
const window = 1 << 20

// Server makes a server that forwards.
func (p *Proxy) Server(options ...grpc.ServerOption) *grpc.Server {
	const workers = 8 // that keep the stacks they grew
	return grpc.NewServer(append(options, grpc.ForceServerCodecV2(wire{}), grpc.UnknownServiceHandler(p.handle),
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window), grpc.NumStreamWorkers(workers))...)
}

// Dial connects to a CSI driver's socket, unix:///path.
func Dial(endpoint string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient(endpoint, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window), redial.Soon(),
	}, options...)...)
}

func (p *Proxy) handle(_ any, stream grpc.ServerStream) error {
	ctx := stream.Context()
	method, ok := grpc.MethodFromServerStream(stream)
	if !ok {
		return status.Error(codes.Internal, "a call without a method")
	}
	var in message
	if err := stream.RecvMsg(&in); err != nil {
		return err
	}
	if err := stream.RecvMsg(&message{}); err == nil {
		return status.Errorf(codes.Unimplemented, "%s: streams are not forwarded", method)
	}
	next := func(ctx context.Context, request []byte) ([]byte, error) {
		if md, ok := metadata.FromIncomingContext(ctx); ok {
			ctx = metadata.NewOutgoingContext(ctx, md)
		}
		var header, trailer metadata.MD
		var out message
		err := p.Driver.Invoke(ctx, method, &message{request}, &out, grpc.ForceCodecV2(wire{}), grpc.Header(&header), grpc.Trailer(&trailer))
		stream.SetTrailer(trailer)
		return out.bytes, errors.Join(err, stream.SetHeader(header))
	}
	handler := p.Handlers[method]
	var out []byte
	var err error
	if handler == nil {
		out, err = next(ctx, in.bytes)
	} else {
		out, err = handler(ctx, in.bytes, next)
	}
	if err != nil {
		return asItIs(err)
	}
	return stream.SendMsg(&message{out})
}

// asItIs gives the status of an error, details and all; of several joined, the
// first.
func asItIs(err error) error {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Err()
	}
	return err
}
