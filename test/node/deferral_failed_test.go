package node

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D06: a deferral failed because the directory of its record could not be synced. No caller knows of it, so no caller will end it: the
// next start must not find it, or the volume could be used only after a reboot.
func TestD06_ADeferralThatFailedDoesNotComeBack(t *testing.T) {
	t.Parallel()
	n, points := testnode.NewStopped(t, "failpoint"), testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	points.Set(t, "record.renamed", "error")
	if _, _, err := publishTo(t, n, v, n.Target("a"), false, "ext4"); err == nil {
		t.Error("deferred")
	}
	if !points.Reached() {
		t.Error("no record was written")
	}
	points.Off(t)
	n.Restart()
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false))
	down(t, n, v.ID, n.Target("b"))
}
