package monitoring

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// fill fills a file system except for 1 %.
func fill(t *testing.T, at string) {
	t.Helper()
	var st syscall.Statfs_t
	ok(t, syscall.Statfs(at, &st))
	f, err := os.OpenFile(filepath.Join(at, "filler"), os.O_CREATE|os.O_RDWR, 0o600)
	ok(t, err)
	defer f.Close()
	ok(t, syscall.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail-st.Blocks/100)*st.Bsize))
}

// promise makes a volume of nearly all that a pool can promise.
func (w *world) promise(pool string) {
	w.t.Helper()
	c, err := w.one.Client.GetCapacity(ctxOf(w.t), &csi.GetCapacityRequest{Parameters: map[string]string{"pool": pool}})
	ok(w.t, err)
	most := c.GetAvailableCapacity() / 100 * 95
	made, err := w.one.Client.Create(ctxOf(w.t), "promised", most, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": pool}, nil)
	ok(w.t, err)
	w.t.Cleanup(func() { ok(w.t, w.one.Client.Delete(ctxOf(w.t), made.GetVolumeId())) })
}

// askElsewhere requests a copy of a snapshot that another node has.
func (w *world) askElsewhere() {
	w.t.Helper()
	_, err := w.two.Client.CreateVolume(ctxOf(w.t), &csi.CreateVolumeRequest{
		Name: "copy", VolumeCapabilities: []*csi.VolumeCapability{csiclient.Volume{FSType: "ext4"}.Capability()},
		VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: "pool.s" + strings.Repeat("0", 32)}}},
		AccessibilityRequirements: &csi.TopologyRequirement{
			Requisite: []*csi.Topology{{Segments: map[string]string{"topology.csi.crust.dev/node": "node-1"}}}},
	})
	if status.Code(err) != codes.ResourceExhausted {
		w.t.Errorf("a copy of what another node has: %v", err)
	}
}

// damage leaves a file system without its root directory. Only a person may repair that.
func (w *world) damage(v csiclient.Volume) {
	w.t.Helper()
	ok(w.t, w.two.Client.Unstage(ctxOf(w.t), v.ID))
	img := filepath.Join(w.two.Pool, "volumes", strings.TrimPrefix(v.ID, "pool.")+".img")
	run(w.t, "debugfs", "-w", "-R", "clri <2>", img)
	run(w.t, "debugfs", "-w", "-R", "ssv state 2", img)
	if err := w.two.Client.Stage(ctxOf(w.t), v); err == nil {
		w.t.Error("a volume without a root directory was staged")
	}
}

// use creates and deletes volumes on node two, as without any fault, until stop is called.
func (w *world) use() (stop func()) {
	stopping, ended := make(chan struct{}), make(chan struct{})
	c := w.two.Client
	once := func(n int) error {
		w.failpoint.Lock()
		defer w.failpoint.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		v := csiclient.Volume{FSType: "ext4", Group: "4242"}
		made, err := c.Create(ctx, fmt.Sprintf("comes-and-goes-%d", n), size, v, nil, nil)
		if err != nil {
			return err
		}
		v.ID = made.GetVolumeId()
		target := w.two.Target("goes")
		return errors.Join(c.Stage(ctx, v), c.Publish(ctx, v, target, false), c.Unpublish(ctx, v.ID, target), c.Unstage(ctx, v.ID),
			c.Delete(ctx, v.ID))
	}
	go func() {
		defer close(ended)
		for n := 0; ; n++ {
			if err := once(n); err != nil {
				w.t.Errorf("a volume that comes and goes: %v", err)
				return
			}
			select {
			case <-stopping:
				return
			case <-time.After(300 * time.Millisecond):
			}
		}
	}()
	return func() { close(stopping); <-ended }
}

// hangWalk makes an ownership walk hang until the failpoint is off.
func (w *world) hangWalk(v csiclient.Volume) {
	w.t.Helper()
	w.failpoint.Lock() // only the first caller hangs
	defer w.failpoint.Unlock()
	target := w.two.Target("walked")
	hung, ended := w.failsOnTwo.Hang(w.t, "ownership.change", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 3*patience) // it outlives a wait that fails
		defer cancel()
		return w.two.Client.Publish(ctx, v, target, false)
	})
	if !hung {
		w.t.Fatalf("the walk did not hang: %v", <-ended)
	}
	w.t.Cleanup(func() {
		w.failsOnTwo.Off(w.t)
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
		if err := w.two.Client.Unpublish(ctxOf(w.t), v.ID, target); err != nil {
			w.t.Error(err)
		}
	})
}

// failSandbox publishes for a pod whose runtime's CRUST server is away.
func (w *world) failSandbox(v csiclient.Volume) {
	w.t.Helper()
	target := w.one.Target("sandboxed")
	ok(w.t, os.MkdirAll(filepath.Dir(target), 0o750))
	_, err := w.proxy.NodePublishVolume(ctxOf(w.t), &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, TargetPath: target, StagingTargetPath: w.one.Client.StagingPath(v.ID), VolumeCapability: v.Capability(),
		VolumeContext: map[string]string{"csi.storage.k8s.io/pod.name": "a", "csi.storage.k8s.io/pod.namespace": "tenant",
			"csi.storage.k8s.io/pod.uid": "uid-a"},
	})
	if err == nil {
		w.t.Error("a volume was published for a sandbox that nobody can ask")
	}
	w.t.Logf("as it should be: %v", err)
}
