package node

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D07: the disk of the state directory is full. Pods end all the same, also beside a csi-node that was started meanwhile. What needs a
// record is refused with the volume, the reason and a code after which the kubelet undoes what was done before. Later it succeeds.
func TestD07_AFullStateDirectory(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "state", state)
	t.Cleanup(func() { testnode.Unmount(t, state) })
	n := testnode.New(t, "", "--state-dir", state)
	used, target := up(t, n, "used", csiclient.Volume{FSType: "ext4"})
	v := create(t, n, "new", csiclient.Volume{FSType: "xfs"})
	w := create(t, n, "deferred", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), w))
	_, _, err := publishTo(t, n, w, n.Target("d"), true, "ext4")
	ok(t, err)
	ballast := filepath.Join(state, "ballast")
	fill(ballast)
	refused(t, n.Client.Stage(ctxOf(t), v), codes.Unavailable, v.ID, "no space left", "Make room")
	err = n.Client.Publish(ctxOf(t), used, n.Target("b"), true)
	refused(t, err, codes.Unavailable, used.ID, n.Target("b"), "no space left", "Make room")
	_, _, err = publishTo(t, n, w, n.Target("e"), true, "ext4")
	refused(t, err, codes.Unavailable, w.ID, n.Target("e"), "no space left", "Make room")
	ok(t, n.Client.Unpublish(ctxOf(t), w.ID, n.Target("d")))
	n.Restart()
	ok(t, n.Client.Unpublish(ctxOf(t), used.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), used.ID))
	ok(t, os.Remove(ballast))
	ok(t, n.Client.Stage(ctxOf(t), v))
	_, _, err = publishTo(t, n, w, n.Target("e"), true, "ext4")
	ok(t, err)
	down(t, n, v.ID)
	down(t, n, w.ID, n.Target("e"))
	ok(t, n.Client.Delete(ctxOf(t), used.ID))
}

// D07: the disk of the state directory has become read-only, as after an error of that disk. Pods start and end all the same if nothing is
// to be recorded, or removed. What needs a record is refused with the reason.
func TestD07_AReadOnlyStateDirectory(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	n := testnode.New(t, "", "--state-dir", state)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	var records []string
	for _, name := range []string{"published", "staged"} {
		dir := filepath.Join(state, name)
		run(t, "mount", "--bind", dir, dir)
		t.Cleanup(func() { testnode.Unmount(t, dir) })
		run(t, "mount", "-o", "remount,bind,ro", dir)
		records = append(records, dir)
	}
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
	err := n.Client.Publish(ctxOf(t), v, n.Target("c"), true)
	refused(t, err, codes.Unavailable, v.ID, n.Target("c"), "read-only file system", "mend it")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.Unavailable, v.ID, "read-only file system", "mend it")
	for _, dir := range records {
		run(t, "mount", "-o", "remount,bind,rw", dir)
	}
	down(t, n, v.ID)
}

// D07: the same while a static volume is due to grow. It grows, and its pod starts: that it has grown is noted another time.
func TestD07_AFullStateDirectoryAndAVolumeThatGrows(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "state", state)
	t.Cleanup(func() { testnode.Unmount(t, state) })
	file, dev := disk(t, size)
	run(t, "mkfs.xfs", "-q", dev)
	ok(t, os.Truncate(file, 2*size))
	run(t, "losetup", "-c", dev)
	n := testnode.New(t, "", "--state-dir", state, "--allow-device", dev)
	v, target := static("a", dev, "xfs"), n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ballast := filepath.Join(state, "ballast")
	fill(ballast)
	other := static("other", dev, "xfs")
	refused(t, n.Client.Stage(ctxOf(t), other), codes.Unavailable, other.ID, "no space left", "Make room")
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := statfs(t, target); got < size+size/2 {
		t.Errorf("the pod has %d bytes", got)
	}
	ok(t, os.Remove(ballast))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}
