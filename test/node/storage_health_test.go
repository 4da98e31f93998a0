package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// storageHealth returns the problems of a node's pools.
func storageHealth(t testing.TB, n *testnode.Node) string {
	t.Helper()
	resp, err := n.Client.NodeGetStorageHealth(ctxOf(t), &csi.NodeGetStorageHealthRequest{})
	ok(t, err)
	var all []string
	for _, e := range resp.GetBackendHealth() {
		all = append(all, fmt.Sprintf("%s %s: %s", e.GetStatus(), e.GetReason(), e.GetMessage()))
	}
	return strings.Join(all, "\n")
}

// 11.5: two pools on one disk.
func TestHealth_OfPoolsThatAreFull(t *testing.T) {
	t.Parallel()
	n := stoppedOnPool(t, "ext4", "", 640<<20)
	n.Args = append(n.Args, "--pool", "other=loop:"+filepath.Join(filepath.Dir(n.PoolDir()), "other"))
	n.Begin()
	if got := storageHealth(t, n); got != "" {
		t.Errorf("of sound pools: %s", got)
	}
	filler := filepath.Join(filepath.Dir(n.PoolDir()), "filler")
	var st unix.Statfs_t
	ok(t, unix.Statfs(n.PoolDir(), &st))
	run(t, "fallocate", "-l", fmt.Sprint((int64(st.Bavail)-int64(st.Blocks)/40)*st.Bsize), filler) // half of the limit for "nearly full"
	if got := storageHealth(t, n); strings.Count(got, "\n") != 0 ||
		!strings.HasPrefix(got, "STORAGE_DEGRADED PoolNearlyFull: pool pool ") ||
		!strings.Contains(got, "; pool other ") {
		t.Errorf("of pools that are nearly full: %s", got)
	}
	fill(filler)
	if got := storageHealth(t, n); strings.Count(got, "\n") != 0 || !strings.HasPrefix(got, "STORAGE_DEGRADED PoolFull: pool pool ") {
		t.Errorf("of pools that are full: %s", got)
	}
	ok(t, os.Remove(filler))
	if got := storageHealth(t, n); got != "" {
		t.Errorf("with room again: %s", got)
	}
}

// 11.5: a pool whose disk is not mounted.
func TestHealth_OfAPoolThatIsAway(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Begin()
	n.Stop()
	unmount()
	n.Start()
	if got := storageHealth(t, n); !strings.HasPrefix(got, "STORAGE_UNREACHABLE PoolIsAway: pool pool ") {
		t.Errorf("%q", got)
	}
	mount()
	n.Restart()
	if got := storageHealth(t, n); got != "" {
		t.Errorf("when it is back: %s", got)
	}
}
