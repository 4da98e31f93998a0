package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/privatesocket"
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
func Dial(endpoint string, options ...grpc.DialOption) (*Connection, error) {
	c := &Connection{path: strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix:"), "//"), dial: func() (*grpc.ClientConn, error) {
		return grpc.NewClient(endpoint, append([]grpc.DialOption{
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
			grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window), redial.Soon(),
		}, options...)...)
	}}
	var err error
	c.now, err = c.open(nil)
	return c, err
}

// Connection is a connection to a driver. When another socket is at the path, new calls go there, as those of a kubelet do, which connects
// for each call: the driver's process before may hang for ever, with its connections. Calls that it has are finished there.
type Connection struct {
	path string
	dial func() (*grpc.ClientConn, error)

	mu  sync.Mutex
	now *link
}

var _ grpc.ClientConnInterface = (*Connection)(nil)

// link is a connection to one socket.
type link struct {
	*grpc.ClientConn
	socket os.FileInfo // nil: there was none
	users  int         // calls, and the Connection
}

func (c *Connection) open(socket os.FileInfo) (*link, error) {
	conn, err := c.dial()
	return &link{conn, socket, 1}, err
}

// is tells whether a link is to this socket.
func (l *link) is(socket os.FileInfo) bool {
	return l.socket != nil && privatesocket.Same(l.socket, socket)
}

// use returns the link for a call.
func (c *Connection) use() *link {
	socket, err := os.Stat(c.path)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && !c.now.is(socket) {
		if next, err := c.open(socket); err == nil {
			c.leave(c.now)
			c.now = next
		}
	}
	c.now.users++
	return c.now
}

// leave closes a link after its last use. The caller holds mu.
func (c *Connection) leave(l *link) {
	if l.users--; l.users == 0 {
		l.Close()
	}
}

// Invoke is grpc.ClientConn's.
func (c *Connection) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	l := c.use()
	defer func() { c.mu.Lock(); c.leave(l); c.mu.Unlock() }()
	return l.ClientConn.Invoke(ctx, method, args, reply, options...)
}

// NewStream is an error: drivers' nodes have no streams.
func (c *Connection) NewStream(_ context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Errorf(codes.Unimplemented, "%s: streams are not forwarded", method)
}

// Close ends the connection.
func (c *Connection) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now.Close()
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
