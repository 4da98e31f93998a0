package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// onOwnDisk returns a node whose pool is on its own disk, which the returned functions mount and
// unmount.
func onOwnDisk(t *testing.T, args ...string) (n *testnode.Node, mount, unmount func()) {
	t.Helper()
	n = testnode.NewStopped(t, "", args...)
	img := filepath.Join(t.TempDir(), "disk")
	run(t, "truncate", "-s", "1G", img)
	run(t, "mkfs.ext4", "-q", img)
	disk := strings.TrimSpace(run(t, "losetup", "-f", "--show", img))
	t.Cleanup(func() { run(t, "losetup", "-d", disk) })
	at := t.TempDir()
	n.Pool = filepath.Join(at, "pool")
	mount = func() { t.Helper(); run(t, "mount", disk, at) }
	unmount = func() { t.Helper(); testnode.Unmount(t, at) }
	mount()
	t.Cleanup(func() { testnode.Unmount(t, at) })
	return n, mount, unmount
}

// B3: after a reboot the pool's disk is not mounted. Nothing is made on the bare directory, nothing
// counts as deleted, and everything is back when the disk is.
func TestB03_APoolWhoseDiskIsNotMounted(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	other := filepath.Join(n.Dir, "other")
	n.Args = append(n.Args, "--pool", "other=loop:"+other)
	n.Begin()
	v, target := up(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "kept")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	snapshot, err := snapshotNow(t, n, v.ID, "s")
	ok(t, err)
	n.Stop()
	unmount()
	n.Start()
	words := []string{"pool is not at " + n.Pool, "no pool, as if its disk were not mounted", "pools/pool.json"}
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.Unavailable, words...)
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	refused(t, err, codes.Unavailable, words...)
	refused(t, n.Client.Stage(ctxOf(t), v), codes.Unavailable, words...)
	_, err = n.Client.Create(ctxOf(t), "b", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
	refused(t, err, codes.Unavailable, words...)
	if room := left(t, n, nil); room != 0 {
		t.Errorf("a pool that is away has room for %d bytes", room)
	}
	if names, err := os.ReadDir(filepath.Dir(n.Pool)); err != nil || len(names) > 0 {
		t.Errorf("made on the bare directory: %v, %v", names, err)
	}
	r, err := n.Client.Probe(ctxOf(t), &csi.ProbeRequest{})
	if err == nil && r.GetReady().GetValue() {
		t.Error("the node is ready without its pool")
	}
	// The other pool works.
	made, err := n.Client.Create(ctxOf(t), "c", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "other"}, nil)
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	// Another disk at its place is no pool of this name.
	ok(t, os.Mkdir(n.Pool, 0o755))
	ok(t, os.WriteFile(n.Pool+"/pool.json", []byte(`{"kind": "crust-csi.pool", "version": 1, "data": {"id": "another"}}`), 0o600))
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.Unavailable, "the pool in that directory is another one")
	ok(t, os.Remove(n.Pool+"/pool.json"))
	ok(t, os.Remove(n.Pool))
	// The pool is found without a restart.
	mount()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := read(t, target+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	ok(t, err)
	down(t, n, v.ID, target)
	n.Restart() // compares what is open with what was open at the start
}

// B3: the disk disappears while the driver runs. Published volumes can be taken away, and nothing
// counts as deleted.
func TestB03_APoolThatGoesWhileItIsUsed(t *testing.T) {
	t.Parallel()
	n, mount, _ := onOwnDisk(t)
	n.Begin()
	v, target := up(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	w := create(t, n, "w", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "kept")
	run(t, "umount", "-l", filepath.Dir(n.Pool))
	refused(t, n.Client.Delete(ctxOf(t), w.ID), codes.Unavailable, "as if its disk were not mounted")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	if _, err := os.Lstat(target); !os.IsNotExist(err) {
		t.Errorf("the target is still there: %v", err)
	}
	mount()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := read(t, target+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	down(t, n, v.ID, target)
	ok(t, n.Client.Delete(ctxOf(t), w.ID))
	n.Restart()
}

// B3: a pool of a version without identities gets one.
func TestB03_PoolsGetAnIdentity(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Begin()
	v := create(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	n.Stop()
	ok(t, os.Remove(filepath.Join(n.Pool, "pool.json")))
	ok(t, os.RemoveAll(filepath.Join(n.Dir, "state", "pools")))
	n.Start()
	_, err := os.Stat(filepath.Join(n.Pool, "pool.json"))
	ok(t, err)
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// B3: a pool keeps its name but is configured in another directory, by mistake or by a new label of
// the node. Its volumes are not there: none counts as deleted, and none is made there. Volumes in
// use can be taken away.
func TestB03_APoolOfThisNameLiesElsewhere(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Begin()
	v, target := up(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	w := create(t, n, "w", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "kept")
	n.Stop()
	was := n.Pool
	n.Pool = filepath.Join(n.Dir, "new")
	n.Start()
	words := []string{"pool is not at " + n.Pool, "It was in " + was, "pools/pool.json"}
	refused(t, n.Client.Delete(ctxOf(t), w.ID), codes.Unavailable, words...)
	_, err := n.Client.Create(ctxOf(t), "b", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
	refused(t, err, codes.Unavailable, words...)
	if _, err := os.Lstat(n.Pool); !os.IsNotExist(err) {
		t.Errorf("%s was made: %v", n.Pool, err)
	}
	if got := statuses(t, n, v.ID, target); !strings.Contains(got, "PoolIsAway=INACCESSIBLE") {
		t.Errorf("the health of a volume in use is %q", got)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// The operator moves the pool. Until that is done, a volume missing there is not deleted.
	ok(t, os.Mkdir(n.Pool, 0o700))
	run(t, "cp", "-a", was+"/pool.json", n.Pool)
	refused(t, n.Client.Delete(ctxOf(t), w.ID), codes.Unavailable, "pool is not at "+n.Pool, "still in "+was)
	// A container that has only the new directory does not see the old one, which proves nothing.
	ok(t, os.Rename(was, was+".hidden"))
	refused(t, n.Client.Delete(ctxOf(t), w.ID), codes.Unavailable, "pool is not at "+n.Pool, was, "pools/pool.json")
	ok(t, os.Rename(was+".hidden", was))
	run(t, "cp", "-a", was+"/.", n.Pool)
	refused(t, n.Client.Delete(ctxOf(t), w.ID), codes.Unavailable, "still in "+was)
	// The moved pool is found without a restart.
	run(t, "find", was, "-mindepth", "1", "-delete")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := read(t, target+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	down(t, n, v.ID, target)
	n.Restart()
	ok(t, n.Client.Delete(ctxOf(t), w.ID))
	// Without volumes, the pool may be anywhere.
	n.Stop()
	n.Pool = filepath.Join(n.Dir, "third")
	n.Start()
	made := create(t, n, "c", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Delete(ctxOf(t), made.ID))
}

// B3: the state has lost the pool's directory, and the pool's disk is not mounted. The bare
// directory is not taken for the pool.
func TestB03_WhichDirectoryIsThePoolsIsLost(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Begin()
	v := create(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	n.Stop()
	unmount()
	ok(t, os.WriteFile(filepath.Join(n.Dir, "state", "pools", "pool.json"), nil, 0o600))
	n.Start()
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.Unavailable, "as if its disk were not mounted")
	mount()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	n.Restart()
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// B3: a volume that the pool has lost can still be taken away: the staged record names a device
// that is bound to the volume's file.
func TestB03_AVolumeInUseThatThePoolHasNot(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Begin()
	v, target := up(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	n.Stop()
	aside := filepath.Join(filepath.Dir(n.Pool), "aside")
	ok(t, os.Mkdir(aside, 0o700))
	run(t, "sh", "-c", "mv "+n.Pool+"/volumes/* "+aside)
	n.Start()
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, "staged")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	if out := run(t, "losetup", "-n", "-O", "BACK-FILE"); strings.Contains(out, aside) {
		t.Errorf("the volume's device is still there:\n%s", out)
	}
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// D11: a disk that accepts no more writes, like a file system after errors, affects only its own
// pool. The driver starts, and serves the others.
func TestD11_APoolThatIsReadOnlyKeepsNobodyFromStarting(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Args = append(n.Args, "--pool", "other=loop:"+filepath.Join(n.Dir, "other"))
	n.Begin()
	v, target := create(t, n, t.Name(), csiclient.Volume{FSType: "ext4"}), n.Target(t.Name())
	n.Stop()
	at := filepath.Dir(n.Pool)
	run(t, "mount", "-o", "remount,ro", at)
	t.Cleanup(func() { run(t, "mount", "-o", "remount,rw", at) })
	n.Start()
	made, err := n.Client.Create(ctxOf(t), "c", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "other"}, nil)
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	_, err = n.Client.Create(ctxOf(t), "d", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
	refused(t, err, codes.Unavailable, "pool pool", "read-only file system")
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.Unavailable, "read-only file system")
	refused(t, n.Client.Stage(ctxOf(t), v), codes.Unavailable, "read-only file system")
	// The pool is back with its disk, without a restart.
	run(t, "mount", "-o", "remount,rw", at)
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	down(t, n, v.ID, target)
	n.Restart()
}

// D11: a pool's disk that hangs when csi-node starts affects only that pool. The pool is back when
// its disk answers.
func TestD11_APoolThatHangsKeepsNobodyFromStarting(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Args = append(n.Args, "--pool", "other=loop:"+filepath.Join(n.Dir, "other"))
	n.PoolHangs = true
	begin := time.Now()
	n.Begin()
	usual := time.Since(begin)
	v, target := up(t, n, t.Name(), csiclient.Volume{FSType: "ext4"})
	img := image(n, v.ID)
	t.Cleanup(func() {
		if t.Failed() { // nothing of it may affect the next test
			run(t, "sh", "-c", `umount "$0"; for l in $(losetup -n -O NAME -j "$1"); do losetup -d $l; done; true`, target, img)
		}
	})
	doomed := create(t, n, "doomed", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "kept")
	run(t, "sync", "-f", target)
	n.Stop()
	// A file system whose server accepts no request.
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	ok(t, err)
	ok(t, syscall.Mount("none", n.Pool, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
	thaw := sync.OnceFunc(func() { fuse.Close(); run(t, "umount", "-l", n.Pool) })
	t.Cleanup(thaw)
	begin = time.Now()
	n.Start()
	// csi-node waits 5 s for a pool's disk.
	if took := time.Since(begin); took > 10*(5*time.Second+usual) {
		t.Errorf("beside a pool that hangs, a start took %v; the one before it took %v", took, usual)
	}
	made, err := n.Client.Create(ctxOf(t), "c", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "other"}, nil)
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	refused(t, n.Client.Delete(ctxOf(t), doomed.ID), codes.Unavailable, "pool pool has not answered")
	if got := statuses(t, n, v.ID, target); !strings.Contains(got, "INACCESSIBLE") {
		t.Errorf("the health of a volume in use is %q", got)
	}
	thaw()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := n.Client.Delete(ctxOf(t), doomed.ID)
		if err == nil {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("the disk answers again: %v", err)
		}
	}
	if got := read(t, target+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	down(t, n, v.ID, target)
	n.Restart()
}
