package faultgrpc_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

func ExampleUnaryInterceptor() {
	g := grpc.NewServer(grpc.UnaryInterceptor(faultgrpc.UnaryInterceptor), grpc.StreamInterceptor(faultgrpc.StreamInterceptor))
	defer g.Stop()

	// Status maps the error of a server's method to the error that the caller gets.
	method := func(context.Context, any) (any, error) {
		return nil, fmt.Errorf("stage: %w", fault.New(fault.NotFound, "volume %s does not exist", "pool.v1"))
	}
	_, err := faultgrpc.UnaryInterceptor(context.Background(), nil, nil, method)
	fmt.Println(err)
	// Output: rpc error: code = NotFound desc = stage: volume pool.v1 does not exist
}
