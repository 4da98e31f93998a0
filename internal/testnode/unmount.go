package testnode

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// afterStarts delays a call until concurrently started children are through: until its execve(2) a
// child has copies of all descriptors, including those of files on volumes, and csi-node would find
// a volume in use.
func afterStarts(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	syscall.ForkLock.RLock()
	syscall.ForkLock.RUnlock() //nolint:staticcheck // an empty section is what is meant
	return invoke(ctx, method, req, reply, cc, opts...)
}

// Unmount unmounts dir, as umount(8) does, and waits briefly for its users. Tests run in parallel,
// and a child that one of them starts has copies of all descriptors until its execve(2): on a busy
// machine that may take a second.
func Unmount(t testing.TB, dir string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Unmount(dir, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmount %s: %v", dir, err)
		}
	}
}
