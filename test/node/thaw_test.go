package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// dieFrozen kills csi-node while it has a volume frozen for a snapshot.
func dieFrozen(t *testing.T, n *testnode.Node, at testnode.Failpoints, v csiclient.Volume) {
	t.Helper()
	dieCopying(t, n, at, func() error {
		_, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
		return err
	})
}

func dieCopying(t *testing.T, n *testnode.Node, at testnode.Failpoints, makeCopy func() error) {
	t.Helper()
	at.Set(t, "copy.frozen", "kill")
	err := makeCopy()
	if !at.Reached() || status.Code(err) != codes.Unavailable {
		t.Fatalf("it was not killed there: %v", err)
	}
	_ = n.Wait()
	at.Off(t)
}

// poolGoesOn makes another volume, and looks that nothing is left of the snapshot.
func poolGoesOn(t *testing.T, n *testnode.Node, fs string) {
	t.Helper()
	other := create(t, n, "other", csiclient.Volume{FSType: fs})
	ok(t, n.Client.Delete(ctxOf(t), other.ID))
	if left, err := os.ReadDir(filepath.Join(n.PoolDir(), "snapshots")); err != nil || len(left) > 0 {
		t.Errorf("left of the snapshot: %v, %v", left, err)
	}
}

// D06: csi-node dies during a snapshot of a volume whose file system the kernel has made read-only. The rest of the pool goes on.
func TestD06_AFreezeOfAFileSystemThatFailedEnds(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			n, at := switchable(t)
			v, target := up(t, n, "failed", csiclient.Volume{FSType: fs})
			run(t, "mount", "-o", "remount,ro", target)
			dieFrozen(t, n, at, v)
			n.Start()
			poolGoesOn(t, n, fs)
			if exec.Command("fsfreeze", "--unfreeze", target).Run() == nil {
				t.Error("it was frozen still")
			}
			down(t, n, v.ID, target)
		})
	}
}

// D06: csi-node dies while a volume is frozen for a snapshot, and the volume's record cannot be
// used afterwards. The pod's writes go on all the same, and so does the rest of the pool.
func TestD06_AFreezeEndsThoughTheVolumesRecordCannotBeUsed(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			n, at := switchable(t)
			v, target := up(t, n, "frozen", csiclient.Volume{FSType: fs})
			hold := openFile(t, filepath.Join(target, "f"))
			dieFrozen(t, n, at, v)
			// No mount is left to tell the type, but the pod has the file system still.
			run(t, "umount", "-l", target)
			record := recordOf(n, v.ID)
			good := damage(t, record)
			written := writing(hold)
			n.Start()
			endsFrozen(t, written, hold)
			poolGoesOn(t, n, fs)
			write(t, record, good)
			ok(t, hold.Close())
			n.Restart()
			down(t, n, v.ID, target)
		})
	}
}

// D06: as before, and how the volume was staged is lost, too. The kernel's mounts tell what is frozen.
func TestD06_AFreezeEndsThoughNoRecordCanBeUsed(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			n, at := switchable(t)
			v := create(t, n, "frozen", csiclient.Volume{FSType: fs})
			ok(t, n.Client.Stage(ctxOf(t), v))
			// The kernel names this mount first. It is not one of the file system.
			node := n.Target("node")
			ok(t, os.MkdirAll(filepath.Dir(node), 0o750))
			write(t, node, "")
			run(t, "mount", "--bind", loopDevice(t, image(n, v.ID)), node)
			target := n.Target("frozen")
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			hold := openFile(t, filepath.Join(target, "f"))
			dieFrozen(t, n, at, v)
			record, staged := recordOf(n, v.ID), stateFile(t, n, "staged")
			good, goodStaged := damage(t, record), damage(t, staged)
			written := writing(hold)
			n.Start()
			if now := read(t, record); now != "{" {
				t.Errorf("the record is now %q", now)
			}
			endsFrozen(t, written, hold)
			poolGoesOn(t, n, fs)
			write(t, record, good)
			write(t, staged, goodStaged)
			ok(t, hold.Close())
			run(t, "umount", node)
			n.Restart()
			if got := read(t, target+"/f"); got != "written" {
				t.Errorf("the volume has %q", got)
			}
			down(t, n, v.ID, target)
		})
	}
}

// D06: as before, and the volume cannot be thawed either, for whatever reason. Only that volume waits,
// all who ask about it are told, and the thaw is tried again by itself.
func TestD06_AVolumeThatCannotBeThawedWaitsAlone(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		for _, clone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, clone=%t", fs, clone), func(t *testing.T) {
				t.Parallel()
				n, at := switchable(t)
				v, target := up(t, n, "frozen", csiclient.Volume{FSType: fs})
				hold := openFile(t, filepath.Join(target, "f"))
				snapshot := func(name string) error {
					_, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: name})
					return err
				}
				makeClone := func(name string) error {
					_, err := n.Client.Create(ctxOf(t), name, 0, csiclient.Volume{FSType: fs}, nil, cloneOf(v.ID))
					return err
				}
				removeSnapshot := func() error {
					_, err := n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: volume.SnapshotID("pool", "s")})
					return err
				}
				makeCopy, remove := snapshot, removeSnapshot
				if clone {
					makeCopy = makeClone
					remove = func() error { return n.Client.Delete(ctxOf(t), volume.VolumeID("pool", "s")) }
				}
				dieCopying(t, n, at, func() error { return makeCopy("s") })
				written := writing(hold)
				at.Set(t, "thaw", "error")
				n.Start()
				other, otherTarget := up(t, n, "other", csiclient.Volume{FSType: fs})
				down(t, n, other.ID, otherTarget)
				waits := func() {
					t.Helper()
					for _, err := range []error{makeCopy("s"), snapshot("s2"), makeClone("s2"), remove()} {
						refused(t, err, codes.Unavailable, v.ID, "frozen", "injected")
					}
					if h := health(t, n, v.ID, target); !strings.Contains(h, "Frozen") {
						t.Errorf("its health: %s", h)
					}
				}
				waits()
				n.Restart() // the next process knows of it, too
				waits()
				at.Off(t)
				if h := health(t, n, v.ID, target); strings.Contains(h, "Frozen") {
					t.Errorf("its health, when a thaw works: %s", h)
				}
				endsFrozen(t, written, hold)
				poolGoesOn(t, n, fs)
				ok(t, makeCopy("s"))
				ok(t, remove())
				ok(t, hold.Close())
				down(t, n, v.ID, target)
			})
		}
	}
}

// D06, A06: csi-node dies while a volume that guests had is frozen, and how it was staged is lost. That this node may have frozen it
// cannot be told then, so it counts as frozen.
func TestD06_AFreezeOfAGuestsVolumeIsNotForgotten(t *testing.T) {
	t.Parallel()
	n, at := switchable(t)
	v := create(t, n, "frozen", attributed(csiclient.Volume{FSType: "ext4", Context: deferrable}, mayMount))
	ok(t, n.Client.Stage(ctxOf(t), v))
	visit(t, n, v)
	target := n.Target("frozen")
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	hold := openFile(t, filepath.Join(target, "f"))
	dieFrozen(t, n, at, v)
	written := writing(hold)
	staged := stateFile(t, n, "staged")
	good := damage(t, staged)
	n.Start()
	_, err := snapshotNow(t, n, v.ID, "s")
	refused(t, err, codes.Unavailable, v.ID, "frozen", "staged")
	write(t, staged, good)
	n.Restart()
	endsFrozen(t, written, hold)
	poolGoesOn(t, n, "ext4")
	ok(t, hold.Close())
	down(t, n, v.ID, target)
}

// D06: a volume that cannot be resumed after a copy is thawed another way. The copy is refused.
func TestD06_AVolumeThatCannotBeResumedIsThawed(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			n, at := switchable(t)
			v, target := up(t, n, "frozen", csiclient.Volume{FSType: fs})
			hold := openFile(t, filepath.Join(target, "f"))
			at.Set(t, "freeze.resume", "error")
			_, err := snapshotNow(t, n, v.ID, "s")
			refused(t, err, codes.Internal, "resumed")
			endsFrozen(t, writing(hold), hold)
			_, err = n.Client.Create(ctxOf(t), "clone", 0, csiclient.Volume{FSType: fs}, nil, cloneOf(v.ID))
			refused(t, err, codes.Internal, "resumed")
			endsFrozen(t, writing(hold), hold)
			at.Off(t)
			poolGoesOn(t, n, fs)
			ok(t, hold.Close())
			down(t, n, v.ID, target)
		})
	}
}

func openFile(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Create(path)
	ok(t, err)
	t.Cleanup(func() {
		_ = linux.Thaw(f) // or a write to it outlives this process, and nothing can end it
		_ = f.Close()
	})
	return f
}

// damage makes a record unusable and returns what it was.
func damage(t *testing.T, record string) string {
	t.Helper()
	good := read(t, record)
	write(t, record, "{")
	return good
}

func writing(f *os.File) <-chan error {
	written := make(chan error, 1)
	go func() {
		_, err := f.WriteString("written")
		written <- err
	}()
	return written
}

// endsFrozen waits until a write, which a freeze holds up, goes on.
func endsFrozen(t *testing.T, written <-chan error, hold *os.File) {
	t.Helper()
	select {
	case err := <-written:
		ok(t, err)
	case <-ctxOf(t).Done():
		_ = linux.Thaw(hold) // or nothing here ever ends
		t.Fatal("the volume is frozen for ever")
	}
}
