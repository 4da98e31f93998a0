package microvm

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// Answers waits until the guest's agent has answered a call over its channel. It is an error if the
// guest or ctx ends first. Nobody else can use the channel meanwhile.
func (vm *VM) Answers(ctx context.Context) error {
	magic, err := hex.DecodeString(vm.Magic)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		const step = 20 * time.Millisecond
		for ; ctx.Err() == nil; time.Sleep(step) {
			if vm.cmd != nil && !alive(vm.cmd) {
				cancel(errors.New("the guest ended"))
			}
		}
	}()
	conn, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(dial context.Context, _ string) (net.Conn, error) {
			// gRPC's own dial deadline would interrupt a slow boot repeatedly.
			return vport.Dial(ctx, vm.Channel, magic)
		}))
	if err != nil {
		cancel(nil)
		return err
	}
	defer func() { cancel(nil); conn.Close() }()
	_, err = guestv1.NewGuestClient(conn).Info(ctx, &guestv1.InfoRequest{})
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return fmt.Errorf("its agent does not answer: %w", err)
	}
	return nil
}
