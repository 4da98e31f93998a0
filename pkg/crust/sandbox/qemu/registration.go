package qemu

import (
	"context"
	"net"
	"path/filepath"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/crust-csi/crust-csi/internal/channel"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/redial"
	"github.com/crust-csi/crust-csi/internal/vport"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// registration says how to reach a QEMU and its guest.
type registration struct {
	QMP     string `json:"qmp,omitempty"`
	Channel string `json:"channel,omitempty"`
	Magic   []byte `json:"magic,omitempty"`
}

// Registration returns the sockets, and the magic that the guest expects.
func (b *Backend) Registration(r *crustv1alpha1.RegisterSandboxRequest) any {
	q := r.GetQemu()
	if q == nil {
		return nil
	}
	return registration{q.GetQmpSocket(), q.GetChannelSocket(), q.GetChannelMagic()}
}

func reach(spec sandbox.Spec) (r registration, err error) {
	if err := spec.Reach(&r); err != nil {
		return r, err
	}
	if !filepath.IsAbs(r.QMP) {
		return r, fault.New(fault.Invalid, "qmp_socket %q: give an absolute path", r.QMP)
	}
	if err := channel.Check(r.Channel); err != nil {
		return r, fault.New(fault.Invalid, "%w", err)
	}
	if n := len(r.Magic); n != 0 && n != vport.MagicLength {
		return r, fault.New(fault.Invalid, "channel_magic has %d bytes, not %d", n, vport.MagicLength)
	}
	return r, nil
}

func (r registration) connect(ctx context.Context) (*qmp.Client, error) {
	q, err := qmp.Dial(ctx, r.QMP)
	if err != nil {
		return nil, fault.New(fault.State, "QEMU does not answer at %s: %w", r.QMP, err)
	}
	return q, nil
}

// dial returns a connection to the guest, which is made on first use. A guest that does not answer a ping within the timeout is dialled
// again: its channel may be stuck. Until then it may just be busy.
//
// All connections share the limits: a guest decides how often it breaks a connection, and gRPC dials again at once.
func (r registration) dial(timeout time.Duration) (*grpc.ClientConn, error) {
	bytes, connections := rate.NewLimiter(heard, atOnce), rate.NewLimiter(dialled, dialled)
	return grpc.NewClient("passthrough:///guest",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("guest"), grpc.WithUnaryInterceptor(spans),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostOfAnswer), grpc.WaitForReady(true)), grpc.WithMaxHeaderListSize(16<<10),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: timeout}),
		redial.Soon(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if err := connections.Wait(ctx); err != nil {
				return nil, err
			}
			return channel.DialThrough(ctx, r.Channel, r.Magic, func(c net.Conn) net.Conn { return &guestConn{c, timeout, bytes} })
		}))
}
