package node

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// triggerError makes a live ext4 report an error, as if the kernel had met one.
func triggerError(t *testing.T, n *testnode.Node, path string) {
	t.Helper()
	ok(t, os.WriteFile("/sys/fs/ext4/"+strings.TrimPrefix(strings.TrimSpace(run(t, "findmnt", "-nro", "SOURCE", path)), "/dev/")+
		"/trigger_fs_error", []byte("crust test"), 0))
}

// wantHealth waits until the health shows the reason: the kernel counts an error in its own work
// item, some time after the call that met it.
func wantHealth(t *testing.T, n *testnode.Node, id, path, reason string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		got := health(t, n, id, path)
		if strings.Contains(got, reason) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after an error the health is %q, want %s", got, reason)
		}
	}
}

func TestHealthTellsOfFilesystemErrors(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	if got := health(t, n, v.ID, target); got != "" {
		t.Errorf("a sound volume: %q", got)
	}
	triggerError(t, n, target)
	wantHealth(t, n, v.ID, target, "FilesystemError")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// The next stage checks it, and it is healthy again.
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := health(t, n, v.ID, target); got != "" {
		t.Errorf("after the check: %q", got)
	}
	down(t, n, v.ID, target)
}

func TestHealthTellsOfRemountReadOnly(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4", MountFlags: []string{"errors=remount-ro"}})
	triggerError(t, n, target)
	wantHealth(t, n, v.ID, target, "RemountedReadOnly")
	down(t, n, v.ID, target)
}

// D11: a file system that has shut down may report nothing about its own root (xfs). The volume can
// still be unpublished and unstaged, and is healthy after its next stage.
func TestD11_AShutDownFileSystemCanBeTakenAway(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "xfs"})
	write(t, target+"/kept", "kept")
	run(t, "sync", "-f", target)
	run(t, "xfs_io", "-x", "-c", "shutdown -f", target)
	if got := health(t, n, v.ID, target); !strings.Contains(got, "FilesystemShutDown") {
		t.Errorf("the health of a volume that has shut down: %q", got)
	}
	n.Restart()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := read(t, target+"/kept"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	down(t, n, v.ID, target)
}
