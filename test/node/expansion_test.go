package node

import (
	"os"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

func expandTo(t *testing.T, n *testnode.Node, id, path string, bytes int64) (int64, error) {
	t.Helper()
	r, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path,
		StagingTargetPath: n.Client.StagingPath(id), CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}})
	return r.GetCapacityBytes(), err
}

func imageSize(t *testing.T, n *testnode.Node, id string) int64 {
	t.Helper()
	st, err := os.Stat(image(n, id))
	ok(t, err)
	return st.Size()
}

// statfs returns the size of the file system at a path.
func statfs(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	ok(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// With --expansion=node the controller offers no growth: the pod's node enlarges the volume and its
// file system.
func TestFleet_ANodeEnlargesItsVolumes(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--expansion", "node")
	r, err := n.Client.ControllerGetCapabilities(ctxOf(t), &csi.ControllerGetCapabilitiesRequest{})
	ok(t, err)
	for _, c := range r.GetCapabilities() {
		if c.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_EXPAND_VOLUME {
			t.Error("EXPAND_VOLUME is offered by the controller")
		}
	}
	for _, fs := range []string{"xfs", "btrfs", "block"} { // ext4 grows online only with CAP_SYS_RESOURCE
		t.Run(fs, func(t *testing.T) {
			use := csiclient.Volume{FSType: fs}
			if fs == "block" {
				use = csiclient.Volume{Block: true}
			}
			v, target := up(t, n, "v"+fs, use)
			before := int64(0)
			if fs != "block" {
				before = statfs(t, target)
			}
			got, err := expandTo(t, n, v.ID, target, 2*size)
			ok(t, err)
			if file := imageSize(t, n, v.ID); got != 2*size || file != 2*size {
				t.Errorf("it has %d bytes, the answer says %d", file, got)
			}
			if fs != "block" && statfs(t, target) < before+size/2 {
				t.Errorf("the pod has %d bytes, and had %d", statfs(t, target), before)
			}
			// A repeated call, a smaller one and one without a size change nothing.
			for _, bytes := range []int64{2 * size, size, 0} {
				if got, err := expandTo(t, n, v.ID, target, bytes); err != nil || got != 2*size {
					t.Errorf("%d bytes: %d %v", bytes, got, err)
				}
			}
			down(t, n, v.ID, target)
		})
	}
	t.Run("offline", func(t *testing.T) {
		// A pod comes to a claim that was enlarged meanwhile: the kubelet stages, and then passes
		// the staging path.
		v := create(t, n, "offline", csiclient.Volume{FSType: "ext4"})
		ok(t, n.Client.Stage(ctxOf(t), v))
		_, err := expandTo(t, n, v.ID, n.Client.StagingPath(v.ID), 2*size)
		ok(t, err)
		target := n.Target("offline")
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		if got := statfs(t, target); got < size+size/2 {
			t.Errorf("the pod has %d bytes", got)
		}
		down(t, n, v.ID, target)
	})
}

// B5: a node refuses growth beyond the pool's room, and a refusal changes nothing.
func TestB05_ANodeEnlargesNothingThatIsNotThere(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--expansion", "node")
	n.PoolOptions = ""
	n.Restart()
	v, target := up(t, n, "v", csiclient.Volume{FSType: "xfs"})
	_, err := expandTo(t, n, v.ID, target, 1<<50)
	refused(t, err, codes.FailedPrecondition, v.ID, "left to promise", "mounted anew")
	if got := imageSize(t, n, v.ID); got != size {
		t.Errorf("the file has %d bytes", got)
	}
	// At another volume's path nothing grows.
	other, elsewhere := up(t, n, "other", csiclient.Volume{FSType: "xfs"})
	if _, err := expandTo(t, n, v.ID, elsewhere, 2*size); err == nil || imageSize(t, n, v.ID) != size {
		t.Errorf("at another volume's target: %v, %d bytes", err, imageSize(t, n, v.ID))
	}
	down(t, n, v.ID, target)
	down(t, n, other.ID, elsewhere)
}

// C06, C07: a deferred volume's device grows for the pod's runtime. If the runtime cannot grow the
// file system, the next stage does, and the call says so.
func TestC06_C07_ANodeEnlargesADeferredVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--expansion", "node")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	info, deferred, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	if !deferred {
		t.Fatal("not deferred")
	}
	expand := func(supported bool, bytes int64) (*csi.NodeExpandVolumeResponse, error) {
		req := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target, StagingTargetPath: n.Client.StagingPath(v.ID),
			CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}}
		ok(t, crust.SetSupportsExpand(req, supported))
		return n.Client.NodeExpandVolume(ctxOf(t), req)
	}
	if _, err := expandTo(t, n, v.ID, n.Target("elsewhere"), 2*size); status.Code(err) != codes.NotFound || imageSize(t, n, v.ID) != size {
		t.Errorf("at a path where it is not: %v, %d bytes", err, imageSize(t, n, v.ID))
	}
	e, err := expand(true, 2*size)
	ok(t, err)
	if source, err := crust.ExpandSource(e); err != nil || source != info.Source || e.GetCapacityBytes() != 2*size ||
		deviceSize(t, info.Source) != "1073741824" {
		t.Errorf("%v %q, %d bytes, the device %s", err, source, e.GetCapacityBytes(), deviceSize(t, info.Source))
	}
	_, err = expand(false, 3*size)
	refused(t, err, codes.FailedPrecondition, v.ID, "cannot grow its file system", "end the pod")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	v.Context = map[string]string{"hostMayMount": "true"} // for a pod that the node mounts for
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := statfs(t, target); got < 2*size+size/2 {
		t.Errorf("the next pod has %d bytes", got)
	}
	down(t, n, v.ID, target)
}
