package testnode

import (
	"context"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// awaitPools waits while a pool that does not hang on purpose has not answered since the start, so that all descriptors are open that the
// driver keeps.
func (n *Node) awaitPools(deadline time.Time) {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for !n.PoolHangs && ctx.Err() == nil {
		_, err := n.Client.Probe(ctx, &csi.ProbeRequest{})
		if !strings.Contains(status.Convert(err).Message(), " has not answered ") {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// patientWithPools repeats a call that is refused because the pool's disk has not answered for seconds, as a sidecar does: for five
// minutes at most. While other tests fill the page cache, a disk takes that long for one small write. A test whose pool hangs on
// purpose sets PoolHangs.
func (n *Node) patientWithPools(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := invoke(ctx, method, req, reply, cc, opts...)
		said := status.Convert(err).Message()
		if n.PoolHangs || status.Code(err) != codes.Unavailable || !strings.Contains(said, " has not answered ") || time.Now().After(end) {
			return err
		}
	}
}
