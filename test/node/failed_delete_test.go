package node

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D06: a DeleteVolume failed because the record's directory could not be synced. Its record says that it is being deleted, and the
// next start goes on with that. So nobody gets the volume any more.
func TestD06_ADeletionThatFailedDoesNotComeBack(t *testing.T) {
	t.Parallel()
	n, points := testnode.NewStopped(t, "failpoint"), testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	v, target := up(t, n, "v", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	points.Set(t, "record.renamed", "error")
	if err := n.Client.Delete(ctxOf(t), v.ID); err == nil {
		t.Fatal("deleted")
	}
	points.Off(t)
	if err := n.Client.Stage(ctxOf(t), v); err == nil {
		t.Error("a volume that the next start deletes is staged")
	}
	n.Restart()
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	gone(t, image(n, v.ID))
}
