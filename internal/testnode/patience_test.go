package testnode

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// On a machine with a busy disk a test goes on when a sidecar does.
func TestFleet_ABusyDiskIsAskedAgain(t *testing.T) {
	for _, c := range []struct {
		said  error
		hangs bool
		want  int // calls
	}{
		{status.Error(codes.Unavailable, "pool pool has not answered within 5s, so its disk or server does not answer"), false, 3},
		{status.Error(codes.Unavailable, "pool pool has not answered within 5s, so its disk or server does not answer"), true, 1},
		{status.Error(codes.Unavailable, "pool pool is not here"), false, 1},
		{status.Error(codes.Internal, "pool pool has not answered within 5s"), false, 1},
	} {
		n := 0
		node := Node{PoolHangs: c.hangs}
		err := node.patientWithPools(t.Context(), "", nil, nil, nil,
			func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				if n++; n < 3 {
					return c.said
				}
				return nil
			})
		if n != c.want || (err == nil) != (n == 3) {
			t.Errorf("%v: %d calls, %v; want %d", c.said, n, err, c.want)
		}
	}
}
