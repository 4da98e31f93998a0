package node

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D06: a DeleteVolume failed because the record's directory could not be synced. If the volume can be used afterwards, a restart must not
// delete it.
func TestD06_ADeletionThatFailedDoesNotComeBack(t *testing.T) {
	t.Parallel()
	n, points := testnode.NewStopped(t, "failpoint"), testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	v, target := up(t, n, "v", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "a")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	points.Set(t, "record.renamed", "error")
	if err := n.Client.Delete(ctxOf(t), v.ID); err == nil {
		t.Fatal("deleted")
	}
	points.Off(t)
	if err := n.Client.Stage(ctxOf(t), v); err != nil {
		t.Logf("it is known as being deleted: %v", err) // right
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
		return
	}
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	write(t, target+"/f", "written since, and answered with success")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	n.Restart()
	if err := n.Client.Stage(ctxOf(t), v); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}
