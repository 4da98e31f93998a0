package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const callers = 32

func stats(ctx context.Context, n *testnode.Node, id, path string) error {
	_, err := n.Client.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	return err
}

func TestA12_LookingNeverKeepsAVolumeFromBeingTakenAway(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	target, staging := n.Target("a"), n.Client.StagingPath(v.ID)
	ctx, cancel := context.WithCancel(ctxOf(t))
	var looking sync.WaitGroup
	for i := range callers {
		looking.Go(func() {
			for ctx.Err() == nil {
				var err error
				switch i % 3 {
				case 0:
					err = stats(ctx, n, v.ID, target)
				case 1:
					err = stats(ctx, n, v.ID, staging)
				default:
					_, err = n.Client.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: target})
				}
				// ABORTED: a slow unpublish or unstage was running, which waited for readers.
				if code := status.Code(err); err != nil && code != codes.NotFound && code != codes.Aborted && ctx.Err() == nil {
					t.Errorf("looking: %v", err)
					return
				}
			}
		})
	}
	failed := 0
	try := func(what string, f func() error) {
		// A failed call is repeated, like the kubelet's, so that the rest can run.
		for attempt := 0; ; attempt++ {
			err := f()
			if err == nil {
				return
			}
			if failed++; failed < 5 {
				t.Errorf("%s: %v", what, err)
			}
			if attempt > 100 {
				t.Fatalf("%s never succeeds", what)
			}
		}
	}
	const rounds, times = 6, 8
	for range rounds {
		try("stage", func() error { return n.Client.Stage(ctx, v) })
		for range times {
			try("publish", func() error { return n.Client.Publish(ctx, v, target, false) })
			try("unpublish", func() error { return n.Client.Unpublish(ctx, v.ID, target) })
		}
		try("unstage", func() error { return n.Client.Unstage(ctx, v.ID) })
	}
	if failed > 0 {
		t.Errorf("%d of %d calls failed by the driver's own doing", failed, rounds*(2*times+2))
	}
	cancel()
	looking.Wait()
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

func TestA12_WholeLivesBesideEachOther(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	const rounds, times = 2, 3
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	life := func(name string) error {
		v := csiclient.Volume{FSType: "ext4"}
		made, err := n.Client.Create(ctx, name, size, v, nil, nil)
		if err != nil {
			return fmt.Errorf("create: %w", err)
		}
		v.ID = made.GetVolumeId()
		a, b := n.Target(name+"-a"), n.Target(name+"-b")
		var errs []error
		type step struct {
			what string
			do   func() error
		}
		steps := []step{
			{"stage", func() error { return n.Client.Stage(ctx, v) }},
			{"publish", func() error { return n.Client.Publish(ctx, v, a, false) }},
			{"second publish", func() error { return n.Client.Publish(ctx, v, b, true) }},
			{"stats", func() error { return stats(ctx, n, v.ID, a) }},
			{"unpublish", func() error { return n.Client.Unpublish(ctx, v.ID, a) }},
			{"second unpublish", func() error { return n.Client.Unpublish(ctx, v.ID, b) }},
		}
		for range times { // a publish is short, and others format meanwhile
			steps = append(steps, steps[1], steps[4])
		}
		steps = append(steps,
			step{"unstage", func() error { return n.Client.Unstage(ctx, v.ID) }},
			step{"delete", func() error { return n.Client.Delete(ctx, v.ID) }})
		for _, step := range steps {
			err := step.do()
			for range 20 {
				if err == nil {
					break
				}
				errs = append(errs, fmt.Errorf("%s: %w", step.what, err))
				err = step.do()
			}
		}
		return errors.Join(errs...)
	}
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			for round := range rounds {
				if err := life(fmt.Sprintf("v%d-%d", i, round)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestA12_AForeignHolderIsNamedAtOnce(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, os.Mkdir(filepath.Join(target, "dir"), 0o755))
	holder := exec.Command("sleep", "3600")
	holder.Dir = filepath.Join(target, "dir")
	ok(t, holder.Start())
	t.Cleanup(func() { _ = holder.Process.Kill(); _ = holder.Wait() })
	least := time.Hour
	for range 5 {
		begin := time.Now()
		refused(t, n.Client.Unpublish(ctxOf(t), v.ID, target), codes.FailedPrecondition, target, "in use",
			fmt.Sprintf("process %d (sleep)", holder.Process.Pid))
		least = min(least, time.Since(begin))
	}
	if least > 10*time.Second { // it must not take until the caller's deadline
		t.Errorf("the quickest refusal took %s", least)
	}
	ok(t, holder.Process.Kill())
	_ = holder.Wait()
	down(t, n, v.ID, target)
}
