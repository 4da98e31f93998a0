package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// dieFrozen kills csi-node while it has a volume frozen for a snapshot.
func dieFrozen(t *testing.T, n *testnode.Node, at testnode.Failpoints, v csiclient.Volume) {
	t.Helper()
	at.Set(t, "copy.frozen", "kill")
	_, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
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
			dieFrozen(t, n, at, v)
			record := filepath.Join(n.PoolDir(), "volumes", strings.TrimPrefix(v.ID, "pool.")+".json")
			good := read(t, record)
			write(t, record, "{")
			written := make(chan error, 1)
			go func() { written <- os.WriteFile(filepath.Join(target, "f"), []byte("written"), 0o600) }()
			n.Start()
			if now := read(t, record); now != "{" {
				t.Errorf("the record is now %q", now)
			}
			select {
			case err := <-written:
				ok(t, err)
			case <-ctxOf(t).Done():
				run(t, "fsfreeze", "-u", target)
				t.Fatal("the volume is frozen for ever")
			}
			poolGoesOn(t, n, fs)
			write(t, record, good)
			n.Restart()
			if got := read(t, target+"/f"); got != "written" {
				t.Errorf("the volume has %q", got)
			}
			down(t, n, v.ID, target)
		})
	}
}
