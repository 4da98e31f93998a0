package node

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A05: data that an unstage could not write back is lost. The kernel reports that once. The
// volume's health, the metrics and the history keep reporting it until somebody stages the volume
// again or deletes it.
func TestA05_WritesThatAnUnstageLosesAreKeptInMind(t *testing.T) {
	t.Parallel()
	address := freeAddress(t)
	n := stoppedOnPool(t, "ext4", "", 640<<20, "--metrics-address", address)
	n.Begin()
	filler := filepath.Join(filepath.Dir(n.PoolDir()), "filler")
	lose := func(name string, begun int64) (csiclient.Volume, string) {
		t.Helper()
		v := csiclient.Volume{Block: true}
		made, err := n.Client.Create(ctxOf(t), name, 128<<20, v, nil, nil)
		ok(t, err)
		v.ID = made.GetVolumeId()
		target := n.Target(name)
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		fill(filler)
		data := make([]byte, 32<<20)
		rand.Read(data)
		f, err := os.OpenFile(target, os.O_RDWR, 0)
		ok(t, err)
		_, err = f.Write(data) // into the page cache
		ok(t, err)
		if begun > 0 { // as the kernel does by itself after a while
			ok(t, unix.SyncFileRange(int(f.Fd()), 0, begun, unix.SYNC_FILE_RANGE_WRITE))
		}
		ok(t, f.Close())
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "is lost", "call again")
		return v, target
	}
	series := func(v csiclient.Volume) string {
		return `crust_volume_unhealthy{reason="WritesLost",status="data_loss",volume_id="` + v.ID + `"}`
	}
	// The metrics check volumes every ten seconds.
	shown := func(v csiclient.Volume, want bool) {
		t.Helper()
		for begin := time.Now(); strings.Contains(readMetrics(t, address), series(v)) != want; time.Sleep(100 * time.Millisecond) {
			if time.Since(begin) > time.Minute {
				t.Fatalf("%s is in the metrics: %v, want %v", series(v), !want, want)
			}
		}
	}
	wanted := func(when string, v csiclient.Volume, want bool) {
		t.Helper()
		if got := statuses(t, n, v.ID, ""); strings.Contains(got, "WritesLost=DATA_LOSS") != want {
			t.Errorf("%s, its health is %q", when, got)
		}
	}
	v, target := lose("a", 0)
	wanted("after the first unstage", v, true)
	ok(t, n.Client.Unstage(ctxOf(t), v.ID)) // as the error says
	wanted("after the second", v, true)
	if out, good := crustctl(t, n, "volume", "stats", v.ID); good || !strings.Contains(out, "WritesLost") ||
		!strings.Contains(out, "published nowhere") {
		t.Errorf("crustctl volume stats, where it is published nowhere: %v\n%s", good, out)
	}
	ok(t, n.Client.Unstage(ctxOf(t), v.ID)) // of a volume that is not staged
	ok(t, os.Remove(filler))
	wanted("when there is room", v, true)
	shown(v, true)
	history, good := crustctl(t, n, "history", "--state-dir", filepath.Join(n.Dir, "state"), "--volume", v.ID)
	if !good || strings.Count(history, "writes-lost") != 1 {
		t.Errorf("its history:\n%s", history)
	}
	ok(t, n.Client.Stage(ctxOf(t), v))
	wanted("staged again", v, false)
	shown(v, false)
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	down(t, n, v.ID, target)

	v, _ = lose("b", 16<<20)
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	shown(v, true)
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	ok(t, os.Remove(filler))
	_, err := n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	refused(t, err, codes.NotFound)
	shown(v, false)
}

// D11: a write-back of minutes is no hanging disk. Health says what is running, so that others can
// tell it from a lost volume.
func TestD11_AnUnstageThatTakesLong(t *testing.T) {
	t.Parallel()
	n := testnode.NewStopped(t, "failpoint")
	points := testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	hung, ended := points.Hang(t, "unstage.detached", func() error { return n.Client.Unstage(ctxOf(t), v.ID) })
	if !hung {
		t.Fatal("the unstage does not hang: ", <-ended)
	}
	if got := statuses(t, n, v.ID, ""); got != "BeingTakenAway=UNKNOWN_VOLUME_HEALTH_TYPE" {
		t.Errorf("while it is unstaged, its health is %q", got)
	}
	refused(t, stats(ctxOf(t), n, v.ID, target), codes.Aborted, "being unstaged")
	points.Off(t)
	ok(t, <-ended)
	if got := statuses(t, n, v.ID, ""); got != "" {
		t.Errorf("afterwards, its health is %q", got)
	}
}

// A05: a snapshot asks the kernel for failed writes, and the kernel reports once. That report is
// kept as well.
func TestA05_WritesThatASnapshotFindsLostAreKeptInMind(t *testing.T) {
	t.Parallel()
	n := stoppedOnPool(t, "ext4", "", 640<<20)
	n.Begin()
	filler := filepath.Join(filepath.Dir(n.PoolDir()), "filler")
	v := csiclient.Volume{Block: true}
	made, err := n.Client.Create(ctxOf(t), "a", 128<<20, v, nil, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	fill(filler)
	data := make([]byte, 32<<20)
	rand.Read(data)
	f, err := os.OpenFile(target, os.O_RDWR, 0)
	ok(t, err)
	_, err = f.Write(data) // into the page cache
	ok(t, err)
	ok(t, f.Close())
	syscall.Sync() // reports no failed write to anybody
	ok(t, os.Remove(filler))
	if _, err = snapshotNow(t, n, v.ID, "s"); err == nil {
		t.Error("a snapshot of a volume that just lost writes was taken without a word")
	}
	if got := statuses(t, n, v.ID, ""); !strings.Contains(got, "WritesLost=DATA_LOSS") {
		t.Errorf("its health is %q", got)
	}
	history, good := crustctl(t, n, "history", "--state-dir", filepath.Join(n.Dir, "state"), "--volume", v.ID)
	if !good || strings.Count(history, "writes-lost") != 1 {
		t.Errorf("its history:\n%s", history)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	if err := n.Client.Unstage(ctxOf(t), v.ID); err != nil {
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
