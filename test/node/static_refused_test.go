package node

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A02: a process that has the device open keeps pages of it, while the device's contents may have
// changed.
func TestA02_TheProbeReadsPastThePageCache(t *testing.T) {
	t.Parallel()
	file, dev := disk(t, size)
	opener, err := os.Open(dev)
	ok(t, err)
	defer opener.Close()
	_, err = io.Copy(io.Discard, opener) // zeros, cached while it is open
	ok(t, err)
	made := filepath.Join(t.TempDir(), "made")
	ok(t, os.WriteFile(made, nil, 0o600))
	ok(t, os.Truncate(made, size))
	run(t, "mkfs.ext4", "-q", "-L", "theirs", made)
	run(t, "dd", "if="+made, "of="+file, "bs=1M", "conv=notrunc,sparse", "status=none")
	n := testnode.New(t, "", "--allow-device", dev)
	for _, v := range []csiclient.Volume{static("disk", dev, "xfs"), format(static("said", dev, "xfs"), "IfProbedBlank")} {
		refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, "holds ext4")
	}
	if out := run(t, "dumpe2fs", "-h", file); !strings.Contains(out, "theirs") {
		t.Errorf("the file system was overwritten:\n%s", out)
	}
}

func TestA07_ADeviceThatTheHostUsesIsRefused(t *testing.T) {
	t.Parallel()
	dev := loopOf(t, "ext4")
	n := testnode.New(t, "", "--allow-device", dev)
	at := t.TempDir()
	run(t, "mount", dev, at)
	mounted := true
	defer func() {
		if mounted {
			testnode.Unmount(t, at)
		}
	}()
	for _, v := range []csiclient.Volume{static("files", dev, "ext4"), static("raw", dev, "")} {
		refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, dev, "mounted at "+at)
	}
	testnode.Unmount(t, at)
	mounted = false
	// Any process that has it exclusively.
	const hold = "import os,sys,time;os.open(sys.argv[1],os.O_RDONLY|os.O_EXCL);print('held',flush=True);time.sleep(120)"
	holder := exec.Command("python3", "-c", hold, dev)
	out, err := holder.StdoutPipe()
	ok(t, err)
	ok(t, holder.Start())
	_, err = out.Read(make([]byte, 5))
	ok(t, err)
	for _, v := range []csiclient.Volume{static("files", dev, "ext4"), static("raw", dev, "")} {
		refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, dev, "python3", itoa(holder.Process.Pid))
	}
	ok(t, holder.Process.Kill())
	holder.Wait()
	// The driver itself holds it: a stage beside its own mount, and after a kill.
	v := static("files", dev, "ext4")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	ok(t, n.Client.Stage(ctxOf(t), v))
	n.Restart()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), true))
	for _, target := range []string{n.Target("a"), n.Target("b")} {
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	}
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestA15_ADeviceThatIsRefusedIsNotClaimed(t *testing.T) {
	t.Parallel()
	dev := loopOf(t, "ext4")
	n := testnode.New(t, "", "--allow-device", dev)
	refused(t, stagePatiently(t, n, static("wrong", dev, "xfs")), codes.FailedPrecondition, "holds ext4")
	v := static("right", dev, "ext4")
	ok(t, n.Client.Stage(ctxOf(t), v))
	// A staged device stays claimed, even after a refused stage.
	refused(t, stagePatiently(t, n, static("wrong", dev, "xfs")), codes.FailedPrecondition, "staged as volume right")
	again := v
	again.Block, again.FSType = true, ""
	refused(t, n.Client.Stage(ctxOf(t), again), codes.AlreadyExists)
	refused(t, n.Client.Stage(ctxOf(t), static("other", dev, "ext4")), codes.FailedPrecondition, "staged as volume right")
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}
