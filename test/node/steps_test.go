package node

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// failing returns the failpoints that can give an error.
func failing(t testing.TB) []string {
	t.Helper()
	out := run(t, "grep", "-rhoE", `failpoint\.Err\("[a-z.]+"\)`, "../../internal", "../../pkg",
		"--include=*.go", "--exclude-dir=crust", "--exclude-dir=orchestrator")
	var names []string
	for _, m := range regexp.MustCompile(`"([a-z.]+)"`).FindAllStringSubmatch(out, -1) {
		names = append(names, m[1])
	}
	return inLife(names)
}

// switchable starts a node whose failpoints can be switched.
func switchable(t *testing.T) (*testnode.Node, testnode.Failpoints) {
	t.Helper()
	n, points := testnode.NewStopped(t, "failpoint"), testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	return n, points
}

// D06: each step fails in turn, in the same process. The calls succeed when repeated, and a full
// teardown leaves nothing.
func TestD06_ErrorAtEveryStep(t *testing.T) {
	t.Parallel()
	points := failing(t)
	if len(points) < 20 {
		t.Fatalf("only %d failpoints can fail: %v", len(points), points)
	}
	var mu sync.Mutex
	met := map[string]bool{}
	t.Run("on", func(t *testing.T) {
		// Blank media take other steps than a file system.
		for _, fs := range []string{"ext4", ""} {
			t.Run("medium="+fs, func(t *testing.T) {
				t.Parallel()
				n, at := switchable(t)
				for _, point := range points {
					if failAt(t, n, at, point, fs) {
						mu.Lock()
						met[point] = true
						mu.Unlock()
					}
				}
			})
		}
	})
	for _, point := range points {
		if !met[point] {
			t.Errorf("no call failed for the error at %s: either no run comes past it, or its error is swallowed", point)
		}
	}
}

// failAt makes one step fail, and reports whether a call reached it.
func failAt(t *testing.T, n *testnode.Node, at testnode.Failpoints, point, fs string) (met bool) {
	t.Helper()
	for _, f := range []func(context.Context) error{
		func(ctx context.Context) error { return life(ctx, n, fs) },
		func(ctx context.Context) error { return death(ctx, n) },
	} {
		at.Set(t, point, "error")
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		if err := f(ctx); err != nil {
			met = true
			at.Off(t)
			if err := f(ctx); err != nil {
				t.Fatalf("%s on %q: the repeated calls fail: %v", point, fs, err)
			}
		}
		cancel()
	}
	at.Off(t)
	n.Restart()
	checkNothingLeft(t, n)
	if t.Failed() {
		t.Fatalf("after an error at %s on %q", point, fs)
	}
	return met
}

// D06: each step hangs in turn. Meanwhile another volume lives its life, and a second call on the
// same volume is answered. The hung call continues when it is released.
func TestD06_HungAtEveryStep(t *testing.T) {
	t.Parallel()
	points := failpoints(t)
	var hit atomic.Int32
	t.Run("at", func(t *testing.T) {
		// One node for some of them, beside others.
		for some := range slices.Chunk(points, 10) {
			t.Run(some[0]+" and more", func(t *testing.T) {
				t.Parallel()
				n, at := switchable(t)
				for _, point := range some {
					if hangAt(t, n, at, point) {
						hit.Add(1)
					}
				}
			})
		}
	})
	t.Logf("hung at %d of %d points", hit.Load(), len(points))
	if hit.Load() < 25 {
		t.Errorf("hung at %d points only", hit.Load())
	}
}

// hangAt makes one step hang, and reports whether a call reached it.
func hangAt(t *testing.T, n *testnode.Node, at testnode.Failpoints, point string) (hit bool) {
	t.Helper()
	for _, f := range []func(context.Context) error{
		func(ctx context.Context) error { return life(ctx, n, "xfs") },
		func(ctx context.Context) error { return death(ctx, n) },
	} {
		hung, ended := at.Hang(t, point, func() error { return f(ctxOf(t)) })
		if hung {
			hit = true
			bystander(t, n, point)
		}
		at.Off(t)
		if err := <-ended; err != nil {
			t.Fatalf("%s: what hung and went on failed: %v", point, err)
		}
	}
	return hit
}

// bystander makes calls that must be answered although another volume's hang.
func bystander(t *testing.T, n *testnode.Node, point string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := n.Client
	list, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		t.Fatalf("%s: ListVolumes: %v", point, err)
	}
	for _, e := range list.GetEntries() {
		_, err := c.ControllerExpandVolume(ctx,
			&csi.ControllerExpandVolumeRequest{VolumeId: e.GetVolume().GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 1}})
		if code := status.Code(err); code == codes.DeadlineExceeded || code == codes.Internal {
			t.Errorf("%s: a second call on %s: %v", point, e.GetVolume().GetVolumeId(), err)
		}
	}
	v := csiclient.Volume{FSType: "ext4"}
	made, err := c.Create(ctx, "bystander", size, v, nil, nil)
	if err != nil {
		t.Fatalf("%s: another volume: %v", point, err)
	}
	v.ID = made.GetVolumeId()
	target := n.Target("bystander")
	for what, f := range []func() error{
		func() error { return c.Stage(ctx, v) },
		func() error { return c.Publish(ctx, v, target, false) },
		func() error { return c.Unpublish(ctx, v.ID, target) },
		func() error { return c.Unstage(ctx, v.ID) },
		func() error { return c.Delete(ctx, v.ID) },
	} {
		if err := f(); err != nil {
			t.Fatalf("%s: step %d of another volume: %v", point, what, err)
		}
	}
}

// D06: a deletion was interrupted, and somebody has the volume's file open. The driver starts, and
// the deletion continues when it can.
func TestD06_ADeletionThatCannotGoOnStopsNothing(t *testing.T) {
	t.Parallel()
	n, at := switchable(t)
	v, other := create(t, n, "deleted", csiclient.Volume{FSType: "ext4"}), create(t, n, "other", csiclient.Volume{FSType: "ext4"})
	at.Set(t, "delete.recorded", "error")
	if err := n.Client.Delete(ctxOf(t), v.ID); err == nil {
		t.Fatal("the deletion was not cut short")
	}
	at.Off(t)
	stray := strings.TrimSpace(run(t, "losetup", "-f", "--show", image(n, v.ID)))
	inUse, err := os.Open(stray)
	ok(t, err)
	n.Restart()
	said(t, n, v.ID)
	down(t, n, other.ID)
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, v.ID, "in use", stray)
	ok(t, inUse.Close())
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	gone(t, image(n, v.ID))
}

// D06: nobody may retry a failed snapshot.
func TestD06_ASnapshotThatFailedLeavesNothing(t *testing.T) {
	t.Parallel()
	n, at := switchable(t)
	v := create(t, n, "origin", csiclient.Volume{FSType: "ext4"})
	at.Set(t, "snapshot.recorded", "error")
	if _, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "fails"}); err == nil {
		t.Fatal("the snapshot did not fail")
	}
	at.Off(t)
	left, err := os.ReadDir(filepath.Join(n.PoolDir(), "snapshots"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
