package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// B8: crustctl says what a volume is whose pool is not configured any more, and takes it off its path, as health and the documents say.
func TestB08_AVolumeOfAPoolThatIsNotConfigured(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "left", csiclient.Volume{FSType: "ext4"})
	n.Stop()
	was := n.PoolDir()
	away := filepath.Join(n.Dir, "away")
	ok(t, os.Rename(was, away))
	pool, name := n.Pool, n.PoolName
	n.Pool, n.PoolName = filepath.Join(n.Dir, "another"), "different"
	n.Start()
	if out := exits(t, n, 0, []string{"volume", "list"}, v.ID, "of pool pool, which is not configured"); strings.Contains(out, "static") {
		t.Errorf("it counts as static:\n%s", out)
	}
	out := exits(t, n, 1, []string{"node", "drain-check", "--remove"}, v.ID, "lies in pool pool of this node",
		"start csi-node with pool pool again")
	if strings.Contains(out, "somebody else made") {
		t.Errorf("it counts as static:\n%s", out)
	}
	exits(t, n, 1, []string{"volume", "delete", v.ID}, `is of pool "pool", which this node does not have`)
	exits(t, n, 0, []string{"volume", "unpublish", v.ID, target}, "unpublished and unstaged")
	exits(t, n, 1, []string{"volume", "unpublish", "different.v" + strings.Repeat("0", 32), target}, "NotFound") // a typo
	n.Stop()
	n.Pool, n.PoolName = pool, name
	ok(t, os.Rename(away, was))
	n.Start()
	down(t, n, v.ID, target)
}

// B6: while a pool is away, csi-node runs. What to do is not to start it.
func TestB06_DoctorDoesNotSayToStartADriverThatRuns(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Begin()
	n.Stop()
	unmount()
	n.Start()
	for _, args := range [][]string{{"doctor"}, {"volume", "create", "v"}} {
		out, well := crustctl(t, n, args...)
		if well || !strings.Contains(out, "pool is not at "+n.Pool) {
			t.Errorf("%q: %t\n%s", args, well, out)
		}
		for _, wrong := range []string{"start csi-node", "is csi-node running"} {
			if strings.Contains(out, wrong) {
				t.Errorf("%q says %q:\n%s", args, wrong, out)
			}
		}
	}
	n.Stop()
	out, _ := crustctl(t, n, "doctor")
	if !strings.Contains(out, "start csi-node, or give --endpoint") {
		t.Errorf("nothing answers:\n%s", out)
	}
	exits(t, n, 1, []string{"volume", "list"}, "is csi-node running")
	mount()
	n.Start()
}
