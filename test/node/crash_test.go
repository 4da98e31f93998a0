package node

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// failpoints returns all failpoints of the code.
func failpoints(t testing.TB) []string {
	t.Helper()
	// crustd and crust-agent have their own
	out := run(t, "grep", "-rhoE", `failpoint\.(Hit|Err)\("[a-z.]+"\)`, "../../internal", "../../pkg",
		"--include=*.go", "--exclude-dir=crust", "--exclude-dir=orchestrator")
	var names []string
	for _, m := range regexp.MustCompile(`"([a-z.]+)"`).FindAllStringSubmatch(out, -1) {
		names = append(names, m[1])
	}
	return inLife(names)
}

// inLife sorts the names of failpoints, without those that life does not come past.
func inLife(names []string) []string {
	// Static volumes: TestA02_TheFullReadOutlivesCallersAndKills. After a death in a copy: TestD06_AVolumeThatCannotBeThawedWaitsAlone.
	names = slices.DeleteFunc(names, func(name string) bool { return name == "blank.read" || name == "thaw" })
	slices.Sort(names)
	return slices.Compact(names)
}

// life does everything that can happen to volumes. Each step can be repeated.
func life(ctx context.Context, n *testnode.Node, fs string) error {
	c := n.Client
	v := csiclient.Volume{FSType: fs, Block: fs == ""}
	made, err := c.Create(ctx, "v", size, v, nil, nil)
	if err != nil {
		return err
	}
	v.ID = made.GetVolumeId()
	if err := c.Stage(ctx, v); err != nil {
		return err
	}
	owned := v
	if fs != "" {
		owned.Group = "4242"
	} else if _, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.ID}); err != nil {
		return err // once published, a raw volume can be copied only by sharing extents
	}
	if err := c.Publish(ctx, owned, n.Target("a"), false); err != nil {
		return err
	}
	if err := c.Publish(ctx, v, n.Target("b"), true); err != nil {
		return err
	}
	snap, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.ID})
	if err != nil {
		return err
	}
	copyOf := csiclient.Volume{FSType: fs, Block: v.Block}
	copied, err := c.Create(ctx, "c", size+64<<20, copyOf, nil, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snap.GetSnapshot().GetSnapshotId()}}})
	if err != nil {
		return err
	}
	copyOf.ID = copied.GetVolumeId()
	if err := c.Stage(ctx, copyOf); err != nil { // grows an ext4 here
		return err
	}
	if err := c.Publish(ctx, copyOf, n.Target("c"), false); err != nil {
		return err
	}
	if _, err := c.ControllerExpandVolume(ctx,
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: size + 128<<20}}); err != nil {
		return err
	}
	if fs == "" {
		return nil
	}
	// A volume that is left to a runtime.
	deferred := csiclient.Volume{FSType: fs, Context: deferrable}
	if made, err = c.Create(ctx, "d", size, deferred, nil, nil); err != nil {
		return err
	}
	deferred.ID = made.GetVolumeId()
	if err := c.Stage(ctx, deferred); err != nil {
		return err
	}
	target := n.Target("d")
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	req := &csi.NodePublishVolumeRequest{
		VolumeId: deferred.ID, StagingTargetPath: c.StagingPath(deferred.ID), TargetPath: target, VolumeCapability: deferred.Capability(),
		VolumeContext: deferred.Context,
	}
	if err := crust.SetSupportedFilesystems(req, []string{fs}); err != nil {
		return err
	}
	_, err = c.NodePublishVolume(ctx, req)
	return err
}

// death undoes life. It can be repeated too.
func death(ctx context.Context, n *testnode.Node) error {
	c := n.Client
	vols, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		return err
	}
	for _, e := range vols.GetEntries() {
		id := e.GetVolume().GetVolumeId()
		targets := map[string][]string{"v": {"a", "b"}, "c": {"c"}, "d": {"d"}}[e.GetVolume().GetVolumeContext()["csi.crust.dev/name"]]
		for _, pod := range targets {
			if err := c.Unpublish(ctx, id, n.Target(pod)); err != nil {
				return err
			}
		}
		if err := c.Unstage(ctx, id); err != nil {
			return err
		}
		if err := c.Delete(ctx, id); err != nil {
			return err
		}
	}
	snaps, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	for _, e := range snaps.GetEntries() {
		if _, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: e.GetSnapshot().GetSnapshotId()}); err != nil {
			return err
		}
	}
	return nil
}

// checkNothingLeft checks the pool and the state after everything was deleted.
func checkNothingLeft(t testing.TB, n *testnode.Node) {
	t.Helper()
	left := run(t, "find", n.PoolDir(), filepath.Join(n.Dir, "state"), n.KubeletDir(), "-type", "f", "!", "-name", "lock", "!",
		"-name", "reserve", "!", "-name", "audit*.jsonl", "!", "-name", "pool.json")
	if left != "" {
		t.Errorf("left after everything was deleted:\n%s", left)
	}
}

// D06: the driver is killed at each failpoint in turn. The call that died succeeds when repeated,
// and a full teardown leaves nothing.
func TestD06_KilledAtEveryStep(t *testing.T) {
	t.Parallel()
	testnode.Build(t, "failpoint")
	for _, point := range failpoints(t) {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			hit := false
			for _, fs := range []string{"ext4", "xfs", "btrfs", ""} {
				hit = killAt(t, point, fs) || hit
			}
			if !hit {
				t.Errorf("no run came past the failpoint %s", point)
			}
		})
	}
}

func killAt(t *testing.T, point, fs string) (hit bool) {
	t.Helper()
	n := testnode.NewStopped(t, "failpoint")
	n.Begin()
	for _, f := range []func(context.Context) error{
		func(ctx context.Context) error { return life(ctx, n, fs) },
		func(ctx context.Context) error { return death(ctx, n) },
	} {
		n.Stop()
		n.Env = []string{"CRUST_FAILPOINT=" + point}
		n.Start()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		err := f(ctx)
		n.Env = nil
		if err != nil {
			hit = true
			if got := n.Wait(); got == nil || got.Error() != "signal: killed" {
				t.Fatalf("%s %s: the call failed (%v), but the driver was not killed: %v", point, fs, err, got)
			}
			n.Start()
			if err := f(ctx); err != nil {
				t.Fatalf("%s %s: the repeated calls fail: %v", point, fs, err)
			}
		}
		cancel()
	}
	n.Stop()
	n.Start()
	checkNothingLeft(t, n)
	return hit
}

// D06: the driver is killed at random moments while calls run.
func TestD06_KilledAtRandom(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for round := range 25 {
		fs := filesystems[round%len(filesystems)]
		delay := time.Duration(rand.IntN(60)) * time.Millisecond
		done := make(chan struct{})
		go func() {
			defer close(done)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			_ = life(ctx, n, fs) // the kill interrupts it
		}()
		time.Sleep(delay)
		n.Kill()
		<-done
		n.Start()
		if err := life(ctxOf(t), n, fs); err != nil {
			t.Fatalf("round %d (%s, killed after %s): %v", round, fs, delay, err)
		}
		// Write a byte, and read it back after another kill.
		write(t, filepath.Join(n.Target("a"), "f"), "x")
		n.Restart()
		if read(t, filepath.Join(n.Target("b"), "f")) != "x" {
			t.Fatal("lost a byte")
		}
		if err := death(ctxOf(t), n); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		checkNothingLeft(t, n)
	}
}
