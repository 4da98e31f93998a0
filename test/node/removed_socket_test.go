package node

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// Somebody cleans the kubelet's directory of plugins, or that of the driver. csi-node ends and says why, its DaemonSet starts it again, and
// the kubelet finds it. Otherwise pods could neither start nor end on this node until somebody looks.
func TestCSINodeEndsWithoutItsSocket(t *testing.T) {
	t.Parallel()
	plugins := t.TempDir()
	n := testnode.New(t, "", "--kubelet-registration-dir", plugins)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	for _, socket := range []string{filepath.Join(plugins, "csi.crust.dev-reg.sock"), strings.TrimPrefix(n.Endpoint(), "unix://")} {
		ok(t, os.Remove(socket))
		pid := n.PID()
		goesOn := time.AfterFunc(time.Minute, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		err := n.Wait()
		goesOn.Stop()
		if err == nil || !strings.Contains(n.Log(), "somebody removed the socket "+socket) {
			t.Errorf("without %s csi-node ended with %v", socket, err)
		}
		n.Start()
		_, err = os.Lstat(socket)
		ok(t, err)
	}
	down(t, n, v.ID, target)
}
