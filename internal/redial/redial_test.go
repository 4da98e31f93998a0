package redial_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/internal/redial"
)

// By default there are four attempts in this time, ever less often.
func TestC21_AServerThatIsAwayIsTriedOften(t *testing.T) {
	var tries atomic.Int32
	c, err := grpc.NewClient("passthrough:///away", redial.Soon(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			tries.Add(1)
			return nil, errors.New("away")
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Connect()
	const want, within = 12, 45 * time.Second // gRPC's own pace takes ten minutes for these
	for end := time.Now().Add(within); tries.Load() < want; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("tried %d times in %s", tries.Load(), within)
		}
		c.Connect()
	}
}
