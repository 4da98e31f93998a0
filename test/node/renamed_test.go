package node

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// B4: a pool that got another name is no longer configured under the old one. What pods have of it can be unpublished and unstaged.
func TestB04_VolumesOfARenamedPoolCanBeTakenAway(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	// Names that no test beside this one has: a volume whose pool is not configured is looked for by its name among all loop devices.
	fs, fsTarget := up(t, n, "renamed-fs", csiclient.Volume{FSType: "ext4"})
	write(t, fsTarget+"/f", "kept")
	block, blockTarget := up(t, n, "renamed-block", csiclient.Volume{Block: true})
	ok(t, n.Client.Publish(ctxOf(t), block, n.Target("ro"), true))
	idle := create(t, n, "renamed-idle", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), idle))
	n.Stop()
	n.Pool, n.PoolName = n.PoolDir(), "renamed"
	n.Start()
	refused(t, n.Client.Unpublish(ctxOf(t), fs.ID, blockTarget), codes.FailedPrecondition, "not of this volume")
	refused(t, n.Client.Unstage(ctxOf(t), fs.ID), codes.FailedPrecondition, fs.ID, "is in use")
	for _, gone := range []struct{ id, target string }{{fs.ID, fsTarget}, {block.ID, blockTarget}, {block.ID, n.Target("ro")}} {
		ok(t, n.Client.Unpublish(ctxOf(t), gone.id, gone.target))
		if _, err := os.Lstat(gone.target); !os.IsNotExist(err) {
			t.Errorf("%s is still there", gone.target)
		}
	}
	for _, id := range []string{fs.ID, block.ID, idle.ID} {
		ok(t, n.Client.Unstage(ctxOf(t), id))
		ok(t, n.Client.Unstage(ctxOf(t), id))
	}
	if out := run(t, "losetup", "-nO", "BACK-FILE"); strings.Contains(out, n.PoolDir()) {
		t.Errorf("a device is left:\n%s", out)
	}
	// The volumes have the pool's new name.
	now := csiclient.Volume{ID: "renamed" + fs.ID[len("pool"):], FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), now))
	ok(t, n.Client.Publish(ctxOf(t), now, fsTarget, false))
	if got := read(t, fsTarget+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	down(t, n, now.ID, fsTarget)
	for _, id := range []string{block.ID, idle.ID} {
		ok(t, n.Client.Delete(ctxOf(t), "renamed"+id[len("pool"):]))
	}
}

// B4: a PersistentVolume has the pool's new name already while a pod of the old one ends. What the former has, the latter's end leaves.
func TestB04_APodOfTheOldNameTakesNothingFromOneOfTheNew(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	fs, fsTarget := up(t, n, "two-names-fs", csiclient.Volume{FSType: "ext4"})
	block, blockTarget := up(t, n, "two-names-block", csiclient.Volume{Block: true})
	ok(t, n.Client.Publish(ctxOf(t), block, n.Target("old-ro"), true))
	n.Stop()
	n.Pool, n.PoolName = n.PoolDir(), "renamed"
	n.Start()
	// A device node keeps no device in use.
	refused(t, n.Client.Unstage(ctxOf(t), block.ID), codes.FailedPrecondition, block.ID, "still published at")
	newFS, newBlock := fs, block
	newFS.ID, newBlock.ID = "renamed"+fs.ID[len("pool"):], "renamed"+block.ID[len("pool"):]
	ok(t, n.Client.Stage(ctxOf(t), newFS))
	ok(t, n.Client.Stage(ctxOf(t), newBlock))
	ok(t, n.Client.Publish(ctxOf(t), newBlock, n.Target("new"), false))
	ok(t, n.Client.Publish(ctxOf(t), newBlock, n.Target("new-ro"), true))
	for _, gone := range []struct{ id, target string }{{fs.ID, fsTarget}, {block.ID, n.Target("old-ro")}, {block.ID, blockTarget}} {
		ok(t, n.Client.Unpublish(ctxOf(t), gone.id, gone.target))
	}
	ok(t, n.Client.Unstage(ctxOf(t), fs.ID))
	ok(t, n.Client.Unstage(ctxOf(t), block.ID))
	// A device that was released may be another volume's by now.
	for _, target := range []string{n.Target("new"), n.Target("new-ro")} {
		if size := strings.TrimSpace(run(t, "blockdev", "--getsize64", target)); size == "0" {
			t.Errorf("%s has lost its device", target)
		}
	}
	ok(t, n.Client.Publish(ctxOf(t), newFS, fsTarget, false))
	down(t, n, newFS.ID, fsTarget)
	down(t, n, newBlock.ID, n.Target("new"), n.Target("new-ro"))
	if out := run(t, "losetup", "-nO", "BACK-FILE"); strings.Contains(out, n.PoolDir()) {
		t.Errorf("a device is left:\n%s", out)
	}
}
