package crust

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/privatesocket"
	"github.com/crust-csi/crust-csi/internal/redial"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// maxMessage bounds messages both ways, in bytes.
const maxMessage = 512 << 10

// Client is a connection to a CRUST server.
type Client struct {
	crustv1alpha1.RuntimeAssistedStorageManagementClient
	crustv1alpha1.SandboxManagementClient
	conn *grpc.ClientConn
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Dial prepares a connection to unix:///absolute/path. On each connect it asks the kernel for the
// server's uid (SO_PEERCRED, unix(7)) and disconnects unless uids has it (default: root).
func Dial(endpoint string, uids ...uint32) (*Client, error) {
	return DialWith(endpoint, nil, uids...)
}

// DialWith is Dial with additional gRPC options, such as a stats handler.
func DialWith(endpoint string, options []grpc.DialOption, uids ...uint32) (*Client, error) {
	path, err := privatesocket.Path(endpoint)
	if err != nil {
		return nil, err
	}
	if len(uids) == 0 {
		uids = []uint32{0}
	}
	own := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithUnaryInterceptor(plainErrors), redial.Soon(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
			if err != nil {
				return nil, err
			}
			if err := checkPeer(c, uids); err != nil {
				return nil, errors.Join(fmt.Errorf("%s: the server %w", endpoint, err), c.Close())
			}
			return c, nil
		}),
	}
	conn, err := grpc.NewClient("passthrough:///crust", append(own, options...)...)
	if err != nil {
		return nil, err
	}
	return &Client{crustv1alpha1.NewRuntimeAssistedStorageManagementClient(conn), crustv1alpha1.NewSandboxManagementClient(conn), conn}, nil
}

func checkPeer(c net.Conn, uids []uint32) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("is not on a unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	peer, err := linux.PeerOf(raw)
	if err != nil {
		return err
	}
	if !slices.Contains(uids, peer.UID) {
		return fmt.Errorf("is process %d of user %d; allowed are %v", peer.PID, peer.UID, uids)
	}
	return nil
}

// plainErrors strips a server's error message to plain text. Parts of it come from guests, and it
// reaches events and terminals.
func plainErrors(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	err := invoke(ctx, method, req, reply, conn, options...)
	if st, ok := status.FromError(err); ok && err != nil {
		const most = 1 << 14
		if text := plain.Lines(st.Message(), most); text != st.Message() {
			return status.Error(st.Code(), text)
		}
	}
	return err
}

// Listen creates a socket that accepts only these uids (default: root). It makes missing directories of its path. Its mode is 0600 if they
// are only root and this process's own; otherwise it is 0666 and SO_PEERCRED decides. It replaces a
// stale socket, but not one that answers. refused, if not nil, gets each rejected connection's
// error.
func Listen(endpoint string, refused func(error), uids ...uint32) (net.Listener, error) {
	if len(uids) == 0 {
		uids = []uint32{0}
	}
	mode := os.FileMode(0o600)
	for _, uid := range uids {
		if uid != 0 && int(uid) != os.Geteuid() {
			mode = 0o666
		}
	}
	l, err := privatesocket.Listen(endpoint, mode)
	if err != nil {
		return nil, err
	}
	// The socket file shows that a server was here and may still have volumes.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return &guarded{Listener: l, uids: uids, refused: refused}, nil
}

// guarded accepts only some users.
type guarded struct {
	net.Listener
	uids    []uint32
	refused func(error)
}

func (g *guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		err = checkPeer(c, g.uids)
		if err == nil {
			return c, nil
		}
		if g.refused != nil {
			g.refused(fmt.Errorf("a connection was refused: the peer %w", err))
		}
		c.Close()
	}
}

// Limits returns the gRPC server options for this protocol.
func Limits() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage)}
}
