package node

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// B09: a balance of btrfs is not at its end, and until then the kernel does not grow the file system.
func TestB09_ABalanceThatGoesOnBlocksNoPod(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "a", 2<<30, csiclient.Volume{FSType: "btrfs"}, nil, nil)
	ok(t, err)
	v, target := csiclient.Volume{ID: made.GetVolumeId(), FSType: "btrfs"}, n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	run(t, "sh", "-c", "timeout 3 head -c 600M /dev/urandom > "+target+"/f; sync")
	// A balance that is paused does not end by itself, until the kernel mounts the file system again.
	balance := func() {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			_ = runQuiet("btrfs", "balance", "start", "--background", "--full-balance", target) // one may be under way
			if runQuiet("btrfs", "balance", "pause", target) == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("no balance was paused")
			}
		}
	}
	balance()
	_, err = n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 3 << 30}})
	ok(t, err)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	balance()
	grow := func() error {
		_, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target})
		return err
	}
	refused(t, grow(), codes.Aborted, v.ID, "under way", "try again")
	run(t, "btrfs", "balance", "cancel", target)
	ok(t, grow())
	var st syscall.Statfs_t
	ok(t, syscall.Statfs(target, &st))
	if got := int64(st.Blocks) * st.Bsize; got != 3<<30 {
		t.Errorf("the file system has %d bytes", got)
	}
	down(t, n, v.ID, target)
}

// B09: the file system was moved to another device, so its device has the number 2. That device grows, too.
func TestB09_ADeviceWithANumberOfItsOwnGrows(t *testing.T) {
	t.Parallel()
	_, old := disk(t, size)
	file, dev := disk(t, size)
	run(t, "mkfs.btrfs", "-q", old)
	at := t.TempDir()
	run(t, "mount", old, at)
	t.Cleanup(func() { _ = runQuiet("umount", at) })
	run(t, "btrfs", "device", "add", "-f", dev, at)
	run(t, "btrfs", "device", "remove", old, at)
	run(t, "umount", at)
	n := testnode.New(t, "", "--allow-device", dev)
	v, target := static("a", dev, "btrfs"), n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	for i := range 2 { // in use, and before it is used
		larger := int64(i+2) * size
		ok(t, os.Truncate(file, larger))
		run(t, "losetup", "-c", dev)
		if i == 0 {
			_, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target})
			ok(t, err)
		} else {
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		}
		var st syscall.Statfs_t
		ok(t, syscall.Statfs(target, &st))
		if got := int64(st.Blocks) * st.Bsize; got != larger {
			t.Errorf("the file system has %d bytes, not %d", got, larger)
		}
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// B09: a program refuses to grow the file system: it was made for 2^32 blocks, and its device has more. Its pod starts all the same, at the
// first stage and at later ones, and is told when it asks.
func TestB09_AProgramThatRefusesBlocksNoPod(t *testing.T) {
	t.Parallel()
	file, dev := disk(t, size)
	run(t, "mkfs.ext4", "-q", "-b", "1024", "-O", "^64bit", dev)
	ok(t, os.Truncate(file, 5<<40))
	run(t, "losetup", "-c", dev)
	n := testnode.New(t, "", "--allow-device", dev)
	v, target := static("a", dev, "ext4"), n.Target("a")
	for _, content := range []string{"first", "second"} {
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		write(t, target+"/"+content, content)
		if got := read(t, target+"/first"); got != "first" {
			t.Errorf("read %q", got)
		}
		if _, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target}); err == nil {
			t.Error("it is said to have grown")
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
}
