//go:build vm

package monitoring

import (
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// S09: the alert whose fault takes a kernel with SELinux. The label of a mount cannot be read back, as if the kernel had dropped it.
// TestEveryAlertFires has the other alerts.
func TestS09_ADroppedLabelFiresItsAlert(t *testing.T) {
	n := testnode.NewStopped(t, "")
	address := freeAddress(t)
	n.Args = []string{"--metrics-address", address}
	n.Begin()
	w := &world{t: t}
	v := w.staged(n, "labelled", csiclient.Volume{FSType: "ext4", MountFlags: []string{"context=system_u:object_r:svirt_image_t:s0:c1,c2"}})
	targets := []target{{[]string{address}, map[string]string{"job": "crust-csi-node", "node": "one"}}}
	pace := measured(t, targets)
	rules, _ := pace.rules(t)
	p := newPrometheus(t, pace, rules, targets)
	p.settled(len(targets), 2*time.Duration(pace))

	end := n.Tampered("fgetxattr", "error=EOPNOTSUPP")
	if err := n.Client.Publish(ctxOf(t), v, n.Target("labelled"), false); err == nil {
		t.Error("a volume without its label was published")
	}
	end()
	p.wantFired([]string{"CrustSELinuxMismatch one"})
}
