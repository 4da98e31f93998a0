package node

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const rawSize = 96 << 20

// rawVolume publishes a raw block volume full of data, so that a copy byte by byte takes a while.
func rawVolume(t *testing.T, n *testnode.Node, name, provisioning string) (csiclient.Volume, string) {
	t.Helper()
	v := csiclient.Volume{Block: true}
	made, err := n.Client.Create(ctxOf(t), name, rawSize, v, map[string]string{"provisioning": provisioning}, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	target := n.Target(name)
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	f, err := os.OpenFile(target, os.O_RDWR, 0)
	ok(t, err)
	data := []byte(strings.Repeat("data", 1<<18))
	for off := int64(1 << 20); off < rawSize-1<<20; off += 1 << 20 {
		_, err = f.WriteAt(data, off)
		ok(t, err)
	}
	ok(t, f.Sync())
	ok(t, f.Close())
	return v, target
}

const tailAt = rawSize - 4096

// orderedWriter counts in the head of a device and then in its tail. The head is on the disk before
// it writes the tail, so the tail is never ahead of the head.
func orderedWriter(t *testing.T, device string) (stop func()) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	ok(t, err)
	done := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		block := make([]byte, 4096)
		for i := uint64(1); ; i++ {
			select {
			case <-done:
				return
			default:
			}
			binary.LittleEndian.PutUint64(block, i)
			for _, off := range []int64{0, tailAt} {
				if _, err := f.WriteAt(block, off); err != nil {
					t.Errorf("the writer: %v", err)
					return
				}
				if err := f.Sync(); err != nil {
					t.Errorf("the writer: %v", err)
					return
				}
			}
		}
	})
	return sync.OnceFunc(func() { close(done); writer.Wait(); f.Close() })
}

// torn describes an image whose tail is ahead of its head, or returns "".
func torn(t *testing.T, img string) (string, uint64) {
	t.Helper()
	f, err := os.Open(img)
	ok(t, err)
	defer f.Close()
	var n [2]uint64
	for i, off := range []int64{0, tailAt} {
		b := make([]byte, 8)
		_, err := f.ReadAt(b, off)
		ok(t, err)
		n[i] = binary.LittleEndian.Uint64(b)
	}
	if n[0] < n[1] {
		return fmt.Sprintf("%s is of no one instant: its head has %d, its tail %d", img, n[0], n[1]), n[0]
	}
	return "", n[0]
}

func snapshotNow(t *testing.T, n *testnode.Node, id, name string) (string, error) {
	t.Helper()
	s, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: id, Name: name})
	return s.GetSnapshot().GetSnapshotId(), err
}

// A03: if extents can be shared, a copy of a raw block volume in use is of one instant.
func TestA03_RawInUseIsCopiedInOneInstant(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"xfs", "btrfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := newOnSmallPool(t, pool)
			v, target := rawVolume(t, n, "a", "thin")
			stop := orderedWriter(t, target)
			defer stop()
			last := uint64(0)
			for i := range 6 {
				sid, err := snapshotNow(t, n, v.ID, "s"+itoa(i))
				ok(t, err)
				made, err := n.Client.Create(ctxOf(t), "c"+itoa(i), 0, csiclient.Volume{Block: true}, nil, cloneOf(v.ID))
				ok(t, err)
				for _, img := range []string{snapshotImage(n, sid), image(n, made.GetVolumeId())} {
					wrong, head := torn(t, img)
					if wrong != "" {
						t.Error(wrong)
					}
					if head < last {
						t.Errorf("%s has %d, an earlier copy %d", img, head, last)
					}
					last = head
				}
				ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
				_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
				ok(t, err)
			}
			if last == 0 {
				t.Error("the writer wrote nothing that a copy had")
			}
			stop()
			down(t, n, v.ID, target)
		})
	}
}

// A03: without shared extents, and for thick volumes, which share none, a copy of a raw block
// volume that somebody may write to is refused, even after a kill of the driver. One that is only
// read, or published nowhere, is copied.
func TestA03_RawInUseIsRefusedWhereNothingIsShared(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ pool, origin, copy string }{{"ext4", "thin", "thin"}, {"xfs", "thick", "thick"}, {"xfs", "thick", "thin"},
		{"xfs", "thin", "thick"}} {
		t.Run(fmt.Sprintf("%s copy of %s on %s", c.copy, c.origin, c.pool), func(t *testing.T) {
			n := newOnSmallPool(t, c.pool)
			v, target := rawVolume(t, n, "a", c.origin)
			stop := orderedWriter(t, target)
			defer stop()
			clone := func(name string) (string, error) {
				made, err := n.Client.Create(ctxOf(t), name, 0, csiclient.Volume{Block: true},
					map[string]string{"provisioning": c.copy}, cloneOf(v.ID))
				return made.GetVolumeId(), err
			}
			words := []string{v.ID, target, "unpublish", "reflink"}
			before := usedFiles(t, n)
			for range 2 {
				_, err := clone("c")
				refused(t, err, codes.FailedPrecondition, words...)
				if c.origin == "thick" || c.pool == "ext4" {
					_, err = snapshotNow(t, n, v.ID, "s")
					refused(t, err, codes.FailedPrecondition, words...)
				}
				n.Restart()
			}
			if after := usedFiles(t, n); after != before {
				t.Errorf("a refused copy left something:\n%s", after)
			}
			stop()
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("reader"), true))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			sid, err := snapshotNow(t, n, v.ID, "s")
			ok(t, err)
			cid, err := clone("c")
			ok(t, err)
			if want := sum(t, image(n, v.ID)); sum(t, snapshotImage(n, sid)) != want || sum(t, image(n, cid)) != want {
				t.Error("a copy differs from its origin")
			}
			_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
			ok(t, err)
			ok(t, n.Client.Delete(ctxOf(t), cid))
			down(t, n, v.ID, n.Target("reader"))
		})
	}
}

// A03: a process that kept the device open writes after the last unpublish. The driver cannot know
// it, but the kernel counts its writes.
func TestA03_WritesBehindTheDriversBackAreSeen(t *testing.T) {
	t.Parallel()
	n := newOnSmallPool(t, "ext4")
	v, target := rawVolume(t, n, "a", "thin")
	stop := orderedWriter(t, strings.TrimSpace(run(t, "losetup", "-nO", "NAME", "-j", image(n, v.ID))))
	defer stop()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	// A copy is of one instant if the writer did not run meanwhile.
	whole := func(sid string) {
		t.Helper()
		if wrong, _ := torn(t, snapshotImage(n, sid)); wrong != "" {
			t.Error(wrong)
		}
		_, err := n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
		ok(t, err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		sid, err := snapshotNow(t, n, v.ID, "s")
		if err != nil {
			refused(t, err, codes.FailedPrecondition, v.ID, "written")
			break
		}
		if whole(sid); time.Now().After(deadline) {
			t.Fatal("no copy was refused in a minute")
		}
	}
	stop()
	sid, err := snapshotNow(t, n, v.ID, "s")
	ok(t, err)
	whole(sid)
	down(t, n, v.ID)
}
