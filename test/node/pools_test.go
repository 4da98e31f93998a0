package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// newOnSmallPool starts a node whose pool directory is a file system of 1 GiB.
func newOnSmallPool(t *testing.T, fstype string) *testnode.Node {
	t.Helper()
	n := stoppedOnPool(t, fstype, "", 1<<30)
	n.Begin()
	return n
}

// stoppedOnPool returns a node, not yet started, whose pool directory is a file system of that many
// bytes. tags are build tags of csi-node.
func stoppedOnPool(t *testing.T, fstype, tags string, bytes int64, args ...string) *testnode.Node {
	t.Helper()
	dir := t.TempDir()
	img := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(img)
	ok(t, err)
	ok(t, f.Truncate(bytes))
	ok(t, f.Close())
	run(t, "mkfs."+fstype, "-q", img)
	run(t, "mount", "-o", "loop", img, dir)
	t.Cleanup(func() { testnode.Unmount(t, dir) })
	n := testnode.NewStopped(t, tags, args...)
	n.Pool, n.PoolOptions = filepath.Join(dir, "pool"), "" // the defaults
	return n
}

func usedFiles(t testing.TB, n *testnode.Node) string {
	t.Helper()
	return run(t, "find", n.PoolDir(), "-type", "f")
}

func runQuiet(name string, args ...string) error { return exec.Command(name, args...).Run() }

// fill writes a file until its file system is full.
func fill(path string) {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err == nil { // most of it at once: writing is slow
		_ = exec.Command("fallocate", "-l", fmt.Sprint(int64(st.Bavail)*st.Bsize*9/10+1), path).Run()
	}
	_ = exec.Command("dd", "if=/dev/zero", "of="+path, "bs=1M", "oflag=append", "conv=notrunc", "status=none").Run() // ends with ENOSPC
	_ = exec.Command("dd", "if=/dev/zero", "of="+path, "bs=4k", "oflag=append", "conv=notrunc", "status=none").Run()
	_ = exec.Command("sync", "-f", path).Run()
}

// D03: on a pool whose file system shares extents, a snapshot changes the sector size that direct
// I/O to its origin's file needs (xfs). Every device keeps the same sectors, or neither copy nor
// origin could be mounted again.
func TestD03_SnapshotsThatShareExtentsCanBeMounted(t *testing.T) {
	t.Parallel()
	n := newOnSmallPool(t, "xfs")
	for _, fs := range []string{"ext4", "xfs"} {
		v := csiclient.Volume{FSType: fs}
		made, err := n.Client.Create(ctxOf(t), fs, 320<<20, v, nil, nil)
		ok(t, err)
		v.ID = made.GetVolumeId()
		use := func(v csiclient.Volume, f func(target string)) {
			t.Helper()
			ok(t, n.Client.Stage(ctxOf(t), v))
			target := n.Target(v.ID)
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			device := strings.TrimSpace(run(t, "findmnt", "-no", "SOURCE", target))
			if got := strings.TrimSpace(run(t, "blockdev", "--getss", device)); got != "512" {
				t.Errorf("%s has sectors of %s bytes", fs, got)
			}
			f(target)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		}
		use(v, func(target string) { write(t, target+"/f", "x") })
		snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: fs})
		ok(t, err)
		copied, err := n.Client.Create(ctxOf(t), "copy-"+fs, 320<<20, csiclient.Volume{FSType: fs}, nil, &csi.VolumeContentSource{
			Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snap.GetSnapshot().GetSnapshotId()}}})
		ok(t, err)
		w := csiclient.Volume{ID: copied.GetVolumeId(), FSType: fs}
		use(v, func(string) {})
		use(w, func(target string) {
			if b, err := os.ReadFile(target + "/f"); err != nil || string(b) != "x" {
				t.Errorf("%s: the copy reads %q, %v", fs, b, err)
			}
		})
		_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()})
		ok(t, err)
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
		ok(t, n.Client.Delete(ctxOf(t), w.ID))
	}
}

// A04, D07: a pool that promises more than it has may be full when a volume grows. The volume then
// stays unchanged.
func TestA04_D07_AGrowthWhoseRecordCannotBeWritten(t *testing.T) {
	t.Parallel()
	n := stoppedOnPool(t, "ext4", "", 256<<20)
	n.PoolOptions = ",overcommit=8"
	n.Begin()
	made, err := n.Client.Create(ctxOf(t), "grows", 16<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
	ok(t, err)
	ok(t, os.WriteFile(image(n, made.GetVolumeId()), make([]byte, 16<<20), 0o600)) // eight times what is used can be promised
	// A large file leaves a few blocks free; a small one takes them.
	filler := filepath.Join(n.PoolDir(), "filler")
	ok(t, os.Mkdir(filler, 0o700))
	fill(filepath.Join(filler, "large"))
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(filler, fmt.Sprint(i)), []byte("x"), 0o600)
		run(t, "sync", "-f", filler)
	}
	grow := &csi.ControllerExpandVolumeRequest{VolumeId: made.GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}}
	_, err = n.Client.ControllerExpandVolume(ctxOf(t), grow)
	refused(t, err, codes.ResourceExhausted, "no space left on device")
	if st, err := os.Stat(image(n, made.GetVolumeId())); err != nil || st.Size() != 16<<20 {
		t.Errorf("an expansion that was refused left %d bytes, %v", st.Size(), err)
	}
	run(t, "rm", "-r", filler)
	_, err = n.Client.ControllerExpandVolume(ctxOf(t), grow)
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
}
