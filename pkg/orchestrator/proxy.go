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
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

// message is a message on the wire.
type message struct{ bytes []byte }

// wire passes messages on without decoding them.
type wire struct{}

var _ encoding.CodecV2 = wire{}

// Name is protobuf's: both ends use that.
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

// Call forwards a request's bytes and returns those of the answer.
type Call func(ctx context.Context, request []byte) ([]byte, error)

// Handler replaces a method. It calls next with the driver's request, or does not.
type Handler func(ctx context.Context, request []byte, next Call) ([]byte, error)

// Proxy forwards calls to a driver, with their metadata and deadlines, including unknown methods
// and fields. It returns the driver's errors unchanged. It refuses streams, which CSI drivers do
// not have on their node's socket.
type Proxy struct {
	Driver   grpc.ClientConnInterface
	Handlers map[string]Handler // by full method name
}

// window is gRPC's flow-control window, in bytes. A fixed one avoids the measurements that would
// choose it, and with them a packet each way for most calls.
const window = 1 << 20

// Server returns a server that forwards.
func (p *Proxy) Server(options ...grpc.ServerOption) *grpc.Server {
	const workers = 8 // they keep their grown stacks
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
		err := p.Driver.Invoke(ctx, method, &message{request}, &out, grpc.ForceCodecV2(wire{}),
			grpc.Header(&header), grpc.Trailer(&trailer))
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

// asItIs returns an error's status with its details; the first of several joined. Any other error
// has the code of its fault.
func asItIs(err error) error {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Err()
	}
	return faultgrpc.Status(err)
}
