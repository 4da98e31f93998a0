package node

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// B4: a failure to find a device's owner does not mean "not this volume's". What was staged with it
// keeps it.
func TestB04_WhoseADeviceIsCannotBeTold(t *testing.T) {
	t.Parallel()
	n, at := switchable(t)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	other, otherTarget := up(t, n, "b", csiclient.Volume{FSType: "ext4"})
	at.Set(t, "owner.asked", "error")
	refused(t, n.Client.Unpublish(ctxOf(t), v.ID, otherTarget), codes.Internal, v.ID, "cannot be told")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	at.Off(t)
	refused(t, n.Client.Unstage(ctxOf(t), other.ID), codes.FailedPrecondition, other.ID, "still published at "+otherTarget)
	down(t, n, v.ID)
	down(t, n, other.ID, otherTarget)
}

// B4: a btrfs reports its device only by path. If that node is gone, as after a disk was pulled,
// the volume can still be unpublished, by this process and by the next. Not beside other tests: the
// node is the machine's.
func TestB04_ADeviceWhoseNodeIsGone(t *testing.T) {
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "btrfs"})
	second := n.Target("second")
	ok(t, n.Client.Publish(ctxOf(t), v, second, false))
	node := strings.TrimSpace(run(t, "findmnt", "-nro", "SOURCE", target))
	ok(t, os.Rename(node, node+"-aside"))
	back := sync.OnceFunc(func() { ok(t, os.Rename(node+"-aside", node)) })
	defer back()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	n.Restart()
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, v.ID, "still published at "+second)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, second))
	back()
	down(t, n, v.ID)
}

func TestB04_UnmountingNeedsNoPool(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	fs, fsTarget := up(t, n, "fs", csiclient.Volume{FSType: "ext4"})
	write(t, fsTarget+"/f", "kept")
	block, blockTarget := up(t, n, "block", csiclient.Volume{Block: true})
	ok(t, n.Client.Publish(ctxOf(t), block, n.Target("ro"), true))
	idle := create(t, n, "idle", csiclient.Volume{FSType: "xfs"})
	ok(t, n.Client.Stage(ctxOf(t), idle))
	put := create(t, n, "put", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), put))
	info, _, err := publishTo(t, n, put, n.Target("put"), false, "ext4")
	ok(t, err)
	n.Stop()
	// The pool's name is gone, and its directory is hidden.
	was := n.PoolDir()
	away := filepath.Join(n.Dir, "away")
	ok(t, os.Rename(was, away))
	n.Pool = filepath.Join(n.Dir, "another")
	address := freeAddress(t)
	n.Args = []string{"--pool", "another=loop:" + filepath.Join(n.Dir, "another2"), "--metrics-address", address}
	n.PoolName = "different"
	n.Start()
	// Another pool's volume, beside it.
	other, err := n.Client.Create(ctxOf(t), "fs", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
	ok(t, err)
	ov := csiclient.Volume{ID: other.GetVolumeId(), FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), ov))
	ok(t, n.Client.Publish(ctxOf(t), ov, n.Target("other"), false))
	// Everything else needs the pool.
	refused(t, n.Client.Delete(ctxOf(t), fs.ID), codes.FailedPrecondition, `pool "pool"`)
	// Health says why, and nobody takes the volume for a missing one.
	if got := statuses(t, n, fs.ID, fsTarget); got != "PoolNotConfigured=DEGRADED" {
		t.Errorf("health: %s", got)
	}
	metrics := readMetrics(t, address)
	for end := time.Now().Add(5 * time.Minute); !strings.Contains(metrics, "crust_volume_unhealthy{") && time.Now().Before(end); {
		metrics = readMetrics(t, address) // which waits only two seconds for the first look at all volumes
	}
	for _, v := range []csiclient.Volume{fs, block, idle, put} {
		wantMetric(t, metrics, `crust_volume_unhealthy{reason="PoolNotConfigured",status="degraded",volume_id="`+v.ID+`"}`, "1")
	}
	if strings.Contains(metrics, ov.ID) {
		t.Errorf("a sound volume has a series:\n%s", metrics)
	}
	refused(t, stats(ctxOf(t), n, put.ID, n.Target("put")), codes.Unavailable, "left to the runtime", "its pool is not here")
	refused(t, stats(ctxOf(t), n, fs.ID, fsTarget), codes.NotFound)
	// What does not belong to the volume is left alone.
	refused(t, n.Client.Unpublish(ctxOf(t), fs.ID, n.Target("other")), codes.FailedPrecondition, "not of this volume")
	refused(t, n.Client.Unpublish(ctxOf(t), fs.ID, blockTarget), codes.FailedPrecondition, "not of this volume")
	refused(t, n.Client.Unstage(ctxOf(t), fs.ID), codes.FailedPrecondition, "still published at "+fsTarget)
	release := claim(t, info.Source) // as a sandbox does
	refused(t, n.Client.Unpublish(ctxOf(t), put.ID, n.Target("put")), codes.FailedPrecondition, "still mounted by the sandbox")
	release()
	for _, gone := range []struct{ id, target string }{
		{fs.ID, fsTarget}, {block.ID, blockTarget}, {block.ID, n.Target("ro")}, {put.ID, n.Target("put")},
	} {
		ok(t, n.Client.Unpublish(ctxOf(t), gone.id, gone.target))
		ok(t, n.Client.Unpublish(ctxOf(t), gone.id, gone.target))
		if _, err := os.Lstat(gone.target); !os.IsNotExist(err) {
			t.Errorf("%s is still there", gone.target)
		}
	}
	for _, id := range []string{fs.ID, block.ID, idle.ID, put.ID} {
		ok(t, n.Client.Unstage(ctxOf(t), id))
		ok(t, n.Client.Unstage(ctxOf(t), id))
		files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
		ok(t, err)
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), away+"/") &&
				strings.Contains(string(b), strings.TrimPrefix(id, "pool.")) {
				t.Errorf("%s still has the device %s: %s", id, f, b)
			}
		}
	}
	_, err = n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: fs.ID})
	refused(t, err, codes.NotFound)
	down(t, n, ov.ID, n.Target("other"))
	n.Stop()
	// Nothing of it was lost.
	ok(t, os.Rename(away, was))
	n.Pool, n.PoolName, n.Args = "", "", nil
	n.Start()
	ok(t, n.Client.Stage(ctxOf(t), fs))
	ok(t, n.Client.Publish(ctxOf(t), fs, fsTarget, false))
	if got := read(t, fsTarget+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	down(t, n, fs.ID, fsTarget)
	for _, id := range []string{block.ID, idle.ID, put.ID} {
		ok(t, n.Client.Delete(ctxOf(t), id))
	}
}
