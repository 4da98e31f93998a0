package node

import (
	"os"
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/internal/tracing/collector"
)

// Each potentially slow part of a call has its own span below the call's.
func TestTraces_TheStepsOfANode(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	n := testnode.New(t, "")
	const trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	ctx := metadata.AppendToOutgoingContext(ctxOf(t), "traceparent", "00-"+trace+"-"+caller+"-01")
	steps := func(method string, names ...string) {
		t.Helper()
		call := c.Below(t, caller, "csi-node", "csi.v1.Node/"+method)
		for _, name := range names {
			if s := c.Below(t, call.ID, "csi-node", name); s.Trace != trace || s.Failed || s.Begin.Before(call.Begin) ||
				s.End.After(call.End) {
				t.Errorf("%+v in %+v", s, call)
			}
		}
	}
	v := create(t, n, "a", csiclient.Volume{FSType: "xfs"})
	target := n.Target("a")
	ok(t, os.MkdirAll(n.Client.StagingPath(v.ID), 0o750))
	ok(t, n.Client.Stage(ctx, v))
	steps("NodeStageVolume", "attach device", "prove that the device is blank", "mkfs.xfs")
	ok(t, n.Client.Publish(ctx, with(v, "5000"), target, false))
	steps("NodePublishVolume", "mount", "give files to group")
	_, err := n.Client.Expand(ctx, v.ID, 2*size, target)
	ok(t, err)
	steps("NodeExpandVolume", "grow file system")
	ok(t, n.Client.Unpublish(ctx, v.ID, target))
	ok(t, n.Client.Unstage(ctx, v.ID))
	ok(t, n.Client.Delete(ctx, v.ID))
	steps("NodeUnpublishVolume")

	w := spoiled(t, n, "b", "ext4", errorState)
	ok(t, n.Client.Stage(metadata.AppendToOutgoingContext(ctxOf(t), "traceparent", "00-"+trace+"-00f067aa0ba902b8-01"), w))
	c.Below(t, c.Below(t, "00f067aa0ba902b8", "csi-node", "csi.v1.Node/NodeStageVolume").ID, "csi-node", "e2fsck")
	ok(t, n.Client.Unstage(ctx, w.ID))
	ok(t, n.Client.Delete(ctx, w.ID))
}
