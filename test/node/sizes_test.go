package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// killedWhileExpanding kills csi-node at a failpoint of ControllerExpand, and starts it again.
func killedWhileExpanding(t *testing.T, n *testnode.Node, point, id string, bytes int64) {
	t.Helper()
	n.Stop()
	n.Env = []string{"CRUST_FAILPOINT=" + point}
	n.Start()
	if _, err := expand(t, n, id, bytes); err == nil {
		t.Fatalf("csi-node was not killed at %s", point)
	}
	n.Env = nil
	if err := n.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Fatalf("csi-node was not killed: %v", err)
	}
	n.Start()
}

func expand(t *testing.T, n *testnode.Node, id string, bytes int64) (int64, error) {
	t.Helper()
	r, err := n.Client.ControllerExpandVolume(ctxOf(t), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}})
	return r.GetCapacityBytes(), err
}

func capacityOf(t *testing.T, n *testnode.Node, id string) int64 {
	t.Helper()
	v, err := n.Client.ControllerGetVolume(ctxOf(t), &csi.ControllerGetVolumeRequest{VolumeId: id})
	ok(t, err)
	return v.GetVolume().GetCapacityBytes()
}

func fileSize(t *testing.T, path string) int64 {
	t.Helper()
	st, err := os.Stat(path)
	ok(t, err)
	return st.Size()
}

func snapshotOf(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func cloneOf(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func snapshotImage(n *testnode.Node, id string) string {
	return filepath.Join(n.PoolDir(), "snapshots", strings.TrimPrefix(id, "pool.")+".img")
}

// A04: after a crash between enlarging the file and its record, the file counts. Its file system
// grows into it, and copies contain all of it.
func TestA04_CrashWhileExpandingLosesNothing(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"ext4", "xfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := stoppedOnPool(t, pool, "failpoint", 1<<30)
			n.Begin()
			made, err := n.Client.Create(ctxOf(t), "a", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
			ok(t, err)
			v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			killedWhileExpanding(t, n, "expand.file", v.ID, 256<<20)
			ok(t, n.Client.Stage(ctxOf(t), v))
			target := n.Target("a")
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			data := strings.Repeat("kept behind the old end ", 5<<20)
			write(t, target+"/f", data) // 120 MiB: more than it had
			if got := capacityOf(t, n, v.ID); got != 256<<20 {
				t.Errorf("its file has %d bytes, the driver says %d", fileSize(t, image(n, v.ID)), got)
			}
			snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
			ok(t, err)
			sid := snap.GetSnapshot().GetSnapshotId()
			if got := fileSize(t, snapshotImage(n, sid)); got != 256<<20 || snap.GetSnapshot().GetSizeBytes() != got {
				t.Errorf("the snapshot has %d bytes and says %d", got, snap.GetSnapshot().GetSizeBytes())
			}
			run(t, "e2fsck", "-f", "-n", snapshotImage(n, sid)) // exits 0 only if it is whole
			filler := filepath.Join(n.PoolDir(), "filler")
			fill(filler)
			_, err = expand(t, n, v.ID, 512<<20)
			refused(t, err, codes.ResourceExhausted, "pool")
			if got := fileSize(t, image(n, v.ID)); got != 256<<20 {
				t.Errorf("an expansion that failed left a mounted volume of %d bytes", got)
			}
			ok(t, os.Remove(filler))
			if read(t, target+"/f") != data {
				t.Error("data was lost")
			}
			_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
			ok(t, err)
			down(t, n, v.ID, target)
		})
	}
}

// A04: after a crash between the record and the device, the repeated call enlarges the device. A
// raw block volume has no other call that would.
func TestA04_RepeatedExpandEnlargesTheDevice(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "failpoint")
	made, err := n.Client.Create(ctxOf(t), "a", 64<<20, csiclient.Volume{Block: true}, nil, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), Block: true}
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	for _, point := range []string{"expand.file", "expand.recorded"} {
		want := capacityOf(t, n, v.ID) + 64<<20
		killedWhileExpanding(t, n, point, v.ID, want)
		got, err := expand(t, n, v.ID, want)
		ok(t, err)
		if device := strings.TrimSpace(run(t, "blockdev", "--getsize64", target)); got != want || device != itoa(int(want)) {
			t.Errorf("killed at %s: the call says %d bytes, the device has %s, want %d", point, got, device, want)
		}
	}
	down(t, n, v.ID, target)
}

// A04: a file that somebody shortened cannot be copied or attached: what lay behind its end is
// lost, and must not be lost silently.
func TestA04_ShortFileIsRefused(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{Block: true})
	snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "whole"})
	ok(t, err)
	sid := snap.GetSnapshot().GetSnapshotId()
	ok(t, os.Truncate(image(n, v.ID), size/2))
	ok(t, os.Truncate(snapshotImage(n, sid), size/2))
	words := []string{"shorter", itoa(size), itoa(size / 2)}
	_, err = n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
	refused(t, err, codes.FailedPrecondition, words...)
	for name, source := range map[string]*csi.VolumeContentSource{"clone": cloneOf(v.ID), "restored": snapshotOf(sid)} {
		_, err = n.Client.Create(ctxOf(t), name, 0, csiclient.Volume{Block: true}, nil, source)
		refused(t, err, codes.FailedPrecondition, words...)
	}
	_, err = expand(t, n, v.ID, 2*size)
	refused(t, err, codes.FailedPrecondition, words...)
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, words...)
	if h := health(t, n, v.ID, ""); !strings.Contains(h, "ImageShort") {
		t.Errorf("health says %q", h)
	}
	if got := fileSize(t, image(n, v.ID)); got != size/2 {
		t.Errorf("the file was made %d bytes long", got)
	}
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
	ok(t, err)
	down(t, n, v.ID)
}

// A04: a file without a record is somebody's data (its record was lost, or put aside). A volume of
// the same name must not overwrite it.
func TestA04_FileWithoutRecordIsNotOverwritten(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{Block: true})
	data := bytes.Repeat([]byte("precious"), 512)
	patch(t, image(n, v.ID), 0, data)
	rec := strings.TrimSuffix(image(n, v.ID), ".img") + ".json"
	n.Stop()
	ok(t, os.Rename(rec, rec+".aside"))
	n.Start()
	_, err := n.Client.Create(ctxOf(t), "a", size, csiclient.Volume{Block: true}, nil, nil)
	refused(t, err, codes.FailedPrecondition, image(n, v.ID), "record")
	n.Stop()
	ok(t, os.Rename(rec+".aside", rec))
	n.Start()
	got := make([]byte, len(data))
	f, err := os.Open(image(n, v.ID))
	ok(t, err)
	_, err = f.Read(got)
	ok(t, err)
	ok(t, f.Close())
	if !bytes.Equal(got, data) {
		t.Error("the file was overwritten")
	}
	down(t, n, v.ID)
}

// B1: a thick volume mounts again on a full pool, because its space is reserved. It also mounts
// after its users gave space back, and its health reports that.
func TestB01_ThickMountsOnAFullPool(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"ext4", "xfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := newOnSmallPool(t, pool)
			params := map[string]string{"provisioning": "thick"}
			// More than will be free afterwards.
			made, err := n.Client.Create(ctxOf(t), "a", 560<<20, csiclient.Volume{FSType: "ext4"}, params, nil)
			ok(t, err)
			v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
			target := n.Target("a")
			use := func() {
				t.Helper()
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			}
			release := func() {
				t.Helper()
				ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
				ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			}
			use()
			write(t, target+"/f", "kept")
			release()
			filler := filepath.Join(n.PoolDir(), "filler")
			fill(filler)
			use()
			if h := health(t, n, v.ID, target); strings.Contains(h, "NotReserved") {
				t.Fatalf("health says %q", h)
			}
			data := strings.Repeat("its own space ", 20<<20)
			write(t, target+"/g", data)
			run(t, "sync", "-f", target)
			release()
			use()
			if read(t, target+"/f") != "kept" || read(t, target+"/g") != data {
				t.Error("data was lost")
			}
			release()
			// 32 MiB are freed, at the end of a group that holds no file, and the pool takes them.
			run(t, "fallocate", "--punch-hole", "-o", itoa(500<<20), "-l", itoa(32<<20), image(n, v.ID))
			fill(filler + "2")
			use()
			if h := health(t, n, v.ID, target); !strings.Contains(h, "NotReserved") {
				t.Errorf("health says %q of a volume with holes", h)
			}
			release()
			ok(t, os.Remove(filler))
			use()
			// xfs frees removed files in the background.
			for deadline := time.Now().Add(time.Minute); strings.Contains(health(t, n, v.ID, target),
				"NotReserved"); time.Sleep(100 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("there is room now, and it is not reserved")
				}
				release()
				use()
			}
			ok(t, os.Remove(filler+"2"))
			down(t, n, v.ID, target)
		})
	}
}

// B9: a growth that has to wait does not stop another pod.
func TestB09_AGrowthThatIsDueBlocksNoPod(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--capabilities", strings.Replace(privilege.Storage.List(), ",SYS_RESOURCE", "", 1))
	v, first := up(t, n, "a", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	_, err := n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
	ok(t, err)
	grow := func() error {
		_, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: first})
		return err
	}
	refused(t, grow(), codes.FailedPrecondition, "when it is next staged")
	second := n.Target("b")
	ok(t, n.Client.Publish(ctxOf(t), v, second, false))
	write(t, second+"/f", "both")
	if got := read(t, first+"/f"); got != "both" {
		t.Errorf("read %q", got)
	}
	for _, target := range []string{first, second} {
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	}
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, first, false))
	var st syscall.Statfs_t
	ok(t, syscall.Statfs(first, &st))
	if got := int64(st.Blocks) * st.Bsize; got < 2*size*8/10 {
		t.Errorf("the file system has %d bytes", got)
	}
	down(t, n, v.ID, first)
}
