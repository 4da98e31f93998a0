package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestNFSShare uses a real server on this machine if the kernel has NFS. Otherwise it expects the
// refusal.
func TestNFSShare(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := csiclient.Volume{ID: "share", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "127.0.0.1", "share": "/"}}
	bad := v
	bad.ID, bad.Context = "bad", map[string]string{"server": "a,b", "share": "/none"}
	refused(t, n.Client.Stage(ctxOf(t), bad), codes.InvalidArgument, "server")

	if exec.Command("modprobe", "-n", "nfsd").Run() != nil {
		ok(t, n.Client.Stage(ctxOf(t), v))
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.FailedPrecondition, "127.0.0.1:/")
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		return
	}
	exported := serveNFS(t)
	rw, ro := n.Target("rw"), n.Target("ro")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, rw, false))
	ok(t, n.Client.Publish(ctxOf(t), v, rw, false)) // repeated
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	ok(t, os.WriteFile(rw+"/hello", []byte("from a pod"), 0o644))
	if got := read(t, filepath.Join(exported, "hello")); got != "from a pod" {
		t.Errorf("the server has %q", got)
	}
	if err := os.WriteFile(ro+"/x", nil, 0o644); err == nil {
		t.Error("the read-only publish took a write")
	}
	_, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: rw})
	ok(t, err)
	n.Restart()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, ro))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, rw))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	if strings.Contains(mountinfo(t), "127.0.0.1:/") {
		t.Error("the share is still mounted")
	}
}

// serveNFS exports a directory by the kernel's NFS 4 server until the test ends, and returns the
// directory.
func serveNFS(t *testing.T) string {
	t.Helper()
	// The server cannot export an overlay, so it gets a file system.
	dir, img := t.TempDir(), filepath.Join(t.TempDir(), "img")
	run(t, "truncate", "-s", "64M", img)
	run(t, "mkfs.ext4", "-q", img)
	run(t, "mount", "-o", "loop", img, dir)
	t.Cleanup(func() { testnode.Unmount(t, dir) })
	for _, d := range []string{"/run/rpc_pipefs", "/var/lib/nfs/v4recovery", "/run/sendsigs.omit.d"} {
		ok(t, os.MkdirAll(d, 0o755))
	}
	run(t, "modprobe", "nfsd")
	if _, err := os.Stat("/proc/fs/nfsd/threads"); err != nil {
		run(t, "mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
	}
	run(t, "exportfs", "-o", "rw,no_root_squash,no_subtree_check,fsid=0", "127.0.0.1:"+dir)
	run(t, "rpc.nfsd", "--no-udp", "-N", "3", "--lease-time", "10", "--grace-time", "10", "2")
	mountd := exec.Command("rpc.mountd", "-F", "-N", "3")
	ok(t, mountd.Start())
	t.Cleanup(func() {
		run(t, "rpc.nfsd", "0")
		run(t, "exportfs", "-u", "127.0.0.1:"+dir)
		ok(t, mountd.Process.Kill())
		_ = mountd.Wait() // "signal: killed"
		run(t, "exportfs", "-f")
	})
	time.Sleep(time.Second) // from then on mountd answers the kernel
	return dir
}
