package node

import (
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// A05: pools on one file system share its room. What a pool without overcommit has promised can be written.
func TestA05_PoolsOnOneFileSystemShareItsRoom(t *testing.T) {
	t.Parallel()
	n := stoppedOnPool(t, "ext4", "", 1<<30)
	n.Args = append(n.Args, "--pool", "thin=loop:"+filepath.Join(filepath.Dir(n.PoolDir()), "thin")+",overcommit=2,reserve=8Mi")
	n.Begin()
	raw, inThin := csiclient.Volume{Block: true}, map[string]string{"pool": "thin"}
	first := left(t, n, nil)
	made, err := n.Client.Create(ctxOf(t), "a", 512<<20, raw, inThin, nil)
	ok(t, err)
	// The pool of a promises twice its room, so half of a's size will do.
	if got := left(t, n, nil); got > first-256<<20+first/50 || got < first-256<<20-first/50 {
		t.Errorf("%d were left, the other pool owes 256 MiB, and %d are left", first, got)
	}
	_, err = n.Client.Create(ctxOf(t), "b", first-128<<20, raw, nil, nil)
	refused(t, err, codes.ResourceExhausted, "pool pool ", "on the same file system", "(thin)")
	// What a has taken is no longer owed.
	a := csiclient.Volume{ID: made.GetVolumeId(), Block: true}
	fillDevice := func(v csiclient.Volume, mebibytes int) {
		t.Helper()
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(v.ID), false))
		run(t, "dd", "if=/dev/zero", "of="+n.Target(v.ID), "bs=1M", "count="+itoa(mebibytes), "oflag=direct")
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target(v.ID)))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	fillDevice(a, 256)
	if got := left(t, n, nil); got > first-256<<20+first/50 || got < first-256<<20-first/50 {
		t.Errorf("%d were left, the other pool took 256 MiB, and %d are left", first, got)
	}
	most := left(t, n, nil) &^ (1<<20 - 1)
	made, err = n.Client.Create(ctxOf(t), "b", most, raw, nil, nil)
	ok(t, err)
	if got := left(t, n, inThin); got > 32<<20 {
		t.Errorf("pool promised all of the room, and thin has %d to promise", got)
	}
	_, err = n.Client.Create(ctxOf(t), "c", 128<<20, raw, inThin, nil)
	refused(t, err, codes.ResourceExhausted, "pool thin ", "on the same file system", "(pool)")
	fillDevice(csiclient.Volume{ID: made.GetVolumeId(), Block: true}, int(most>>20))
	// After a restart, too.
	n.Kill()
	n.Start()
	_, err = n.Client.Create(ctxOf(t), "c", 128<<20, raw, inThin, nil)
	refused(t, err, codes.ResourceExhausted, "on the same file system", "(pool)")
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	_, err = n.Client.Create(ctxOf(t), "c", 128<<20, raw, inThin, nil)
	ok(t, err)
}
