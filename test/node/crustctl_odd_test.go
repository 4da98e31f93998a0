package node

import (
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// B8: nothing of a static volume can be deleted, and crustctl does not say that it was.
func TestB08_AStaticVolumeIsNotDeleted(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--allow-device", "/dev/loop*")
	dev := loopOf(t, "ext4")
	target := n.Target("a")
	exits(t, n, 0, []string{"volume", "publish", "disk", target, "--attribute", "device=" + dev}, "published")
	exits(t, n, 1, []string{"volume", "delete", "disk"}, "static")
	exits(t, n, 0, []string{"volume", "unpublish", "disk", target}, "unpublished")
}

// B8: of a raw block volume, its size is known, and not how full it is. What is mounted is a node, and not the file system that has it.
func TestB08_ARawVolumeHasNoUsage(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "raw", csiclient.Volume{Block: true})
	out := exits(t, n, 0, []string{"volume", "stats", v.ID}, "512.0 MiB")
	if strings.Contains(out, " 0.0 MiB") || strings.Contains(out, "UNKNOWN") {
		t.Errorf("stats:\n%s", out)
	}
	out = exits(t, n, 0, []string{"volume", "show", target}, "/dev/loop")
	if strings.Contains(out, "superblock") || strings.Contains(out, "tmpfs") {
		t.Errorf("show:\n%s", out)
	}
	down(t, n, v.ID, target)
}

// B8: volumes of a pool that is away are in no list. crustctl says so, and why.
func TestB08_VolumesOfAPoolThatIsAway(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Begin()
	v := create(t, n, "v", csiclient.Volume{FSType: "ext4"})
	n.Stop()
	unmount()
	n.Start()
	for _, args := range [][]string{{"volume", "list"}, {"volume", "list", "--pool", "pool"}} {
		exits(t, n, 0, args, "pool pool: ")
	}
	for _, args := range [][]string{{"volume", "show", v.ID}, {"volume", "stats", v.ID}} {
		if out := exits(t, n, 1, args, "pool"); strings.Contains(out, "NotFound") {
			t.Errorf("%v: %s", args, out)
		}
	}
	n.Stop()
	mount()
	n.Start()
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// B8: a csi-node that has done nothing yet has no history, which is no error.
func TestB08_TheHistoryOfANewNode(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	exits(t, n, 0, []string{"history"}, "nothing yet")
}
