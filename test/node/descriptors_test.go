package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// openable limits the driver to this many more open descriptors.
func openable(t testing.TB, n *testnode.Node, more int) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.PID()))
	ok(t, err)
	open := map[string]bool{}
	for _, fd := range fds {
		open[fd.Name()] = true
	}
	limit := 0 // a new one gets the lowest free number, and that is below
	for free := 0; open[strconv.Itoa(limit)] || free < more; limit++ {
		if !open[strconv.Itoa(limit)] {
			free++
		}
	}
	run(t, "prlimit", "--pid", itoa(n.PID()), "--nofile="+itoa(limit)+":")
}

// ownDoing reports whether an error's code does not blame the caller.
func ownDoing(err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.NotFound, codes.InvalidArgument, codes.AlreadyExists, codes.OutOfRange:
		return false
	}
	return true
}

// B4: the driver can open few descriptors, or none. It does not take what it cannot check for "no".
// No call blames its caller, and everything is as before once there are descriptors again.
func TestB04_DescriptorsAreUsedUp(t *testing.T) {
	t.Parallel()
	for _, fs := range []string{"ext4", "btrfs", ""} {
		t.Run("medium="+fs, func(t *testing.T) {
			t.Parallel()
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{FSType: fs, Block: fs == ""})
			second := n.Target("second")
			if fs != "" {
				write(t, filepath.Join(target, "f"), "kept")
			}
			in := func(call func(context.Context) error) func() error { return func() error { return call(ctxOf(t)) } }
			calls := map[string]func() error{
				"stats": in(func(ctx context.Context) error { return stats(ctx, n, v.ID, target) }),
				"health": in(func(ctx context.Context) error {
					_, err := n.Client.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: target})
					return err
				}),
				"stage":    in(func(ctx context.Context) error { return n.Client.Stage(ctx, v) }),
				"publish":  in(func(ctx context.Context) error { return n.Client.Publish(ctx, v, target, false) }),
				"expand":   in(func(ctx context.Context) error { return growTo(ctx, n, v, target, size) }),
				"snapshot": in(func(ctx context.Context) error { return snapAndForget(ctx, n, v.ID) }),
				"create": in(func(ctx context.Context) error {
					made, err := n.Client.Create(ctx, "other", size, csiclient.Volume{FSType: "xfs"}, nil, nil)
					if err == nil {
						err = n.Client.Delete(ctx, made.GetVolumeId())
					}
					return err
				}),
				"second": in(func(ctx context.Context) error {
					return errors.Join(n.Client.Publish(ctx, v, second, true), n.Client.Unpublish(ctx, v.ID, second))
				}),
				"unpublish": in(func(ctx context.Context) error { return n.Client.Unpublish(ctx, v.ID, target) }),
				"unstage":   in(func(ctx context.Context) error { return n.Client.Unstage(ctx, v.ID) }),
			}
			order := []string{"stats", "health", "stage", "publish", "expand", "snapshot", "create", "second", "unpublish", "unstage"}
			if fs == "" {
				order = slices.DeleteFunc(order, func(s string) bool { return s == "snapshot" }) // refused if nothing is shared
			}
			failed := 0
			for more := range 12 {
				for _, name := range order {
					openable(t, n, more)
					err := calls[name]()
					run(t, "prlimit", "--pid", itoa(n.PID()), "--nofile=4096:")
					if err == nil {
						continue
					}
					failed++
					if !ownDoing(err) {
						t.Errorf("%d descriptors, %s: %v", more, name, err)
					}
					// The failed call had no effect, and can be repeated.
					ok(t, n.Client.Unpublish(ctxOf(t), v.ID, second))
					if err := calls[name](); err != nil {
						t.Fatalf("%d descriptors, %s, again with enough: %v", more, name, err)
					}
				}
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), v, target, false))
				if fs != "" && read(t, filepath.Join(target, "f")) != "kept" {
					t.Fatal("the file is lost")
				}
			}
			if failed < 12 {
				t.Errorf("only %d calls met the end of descriptors", failed)
			}
			down(t, n, v.ID, target)
		})
	}
}

// growTo grows a volume on the node. It does nothing at the current size.
func growTo(ctx context.Context, n *testnode.Node, v csiclient.Volume, target string, bytes int64) error {
	_, err := n.Client.NodeExpandVolume(ctx,
		&csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target, StagingTargetPath: n.Client.StagingPath(v.ID),
			CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeCapability: v.Capability()})
	return err
}

func snapAndForget(ctx context.Context, n *testnode.Node, id string) error {
	s, err := n.Client.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	if err == nil {
		_, err = n.Client.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: s.GetSnapshot().GetSnapshotId()})
	}
	return err
}
