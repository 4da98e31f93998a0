//go:build vm

package node

import (
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A01: the guests' kernels have device-mapper, so no ioctl of a pod reaches a loop device there.
func TestA01_AMappedDeviceTakesNoIoctls(t *testing.T) {
	n := testnode.New(t, "")
	said(t, n, "raw block volumes: mapped")
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	ro := n.Target("ro")
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	for _, node := range []string{target, ro} {
		for op, answer := range pod(t, node, "clear", "status=0,4096,0", "old-status=4096,0,0", "capacity", "direct=0", "blocksize=4096",
			"change=/etc/passwd", "configure=/etc/passwd") {
			if !strings.Contains(answer, "inappropriate ioctl") {
				t.Errorf("%s: %s", op, answer)
			}
		}
	}
	if answer := pod(t, ro, "write=evil")["write=evil"]; answer == "done" {
		t.Error("a read-only device took a write")
	}
	if got := health(t, n, v.ID, target); got != "" {
		t.Errorf("health: %q", got)
	}
	n.Restart()
	down(t, n, v.ID, ro, target)
	gone(t, image(n, v.ID))
}
