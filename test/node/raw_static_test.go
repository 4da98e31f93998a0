package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A01: a reader of a static raw volume makes its device show another file. The device stays the volume's, also after a kill: the pod can
// end, and nothing of it is left.
func TestA01_AReaderOfAStaticDeviceCannotKeepIt(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprint("killed=", killed), func(t *testing.T) {
			file, dev := disk(t, size)
			write(t, file, "good")
			ok(t, os.Truncate(file, size))
			n := testnode.New(t, "", "--allow-device", dev)
			v := static("reader", dev, "")
			ok(t, n.Client.Stage(ctxOf(t), v))
			one, two := n.Target("one"), n.Target("two")
			ok(t, n.Client.Publish(ctxOf(t), v, one, true))
			evil := filepath.Join(n.Dir, "evil")
			write(t, evil, "evil")
			ok(t, os.Truncate(evil, size))
			pod(t, one, "change="+evil)
			if killed {
				n.Kill()
				n.Start()
			}
			ok(t, n.Client.Publish(ctxOf(t), v, two, true))
			for _, at := range []string{one, two} {
				if got := beginning(t, at, 4); got != "good" {
					t.Errorf("%s begins with %q", at, got)
				}
			}
			pod(t, one, "change="+evil)
			pod(t, two, "change="+evil)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, one))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, two))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			gone(t, dev)
			gone(t, evil)
		})
	}
}

// A01: a static device that grew outside is larger for every pod that has it, once an expansion was answered.
func TestA01_AStaticDeviceGrowsForItsReaders(t *testing.T) {
	t.Parallel()
	file, dev := disk(t, size)
	n := testnode.New(t, "", "--allow-device", dev)
	v := static("grows", dev, "")
	ok(t, n.Client.Stage(ctxOf(t), v))
	rw, ro := n.Target("rw"), n.Target("ro")
	ok(t, n.Client.Publish(ctxOf(t), v, rw, false))
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	const larger = size + 64<<20
	ok(t, os.Truncate(file, larger))
	run(t, "losetup", "-c", dev)
	_, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: ro,
		CapacityRange: &csi.CapacityRange{RequiredBytes: larger}})
	ok(t, err)
	for _, at := range []string{rw, ro} {
		if got := sizeOf(t, at); got != fmt.Sprint(larger) {
			t.Errorf("%s has %s bytes, want %d", at, got, larger)
		}
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, ro))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, rw))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// A01: the device is a loop device that an administrator made read-only. Its reader gets no device of which it can change the file, which
// the next tenant would see.
func TestA01_AReadOnlyLoopDeviceKeepsItsFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "disk")
	write(t, file, "good")
	ok(t, os.Truncate(file, size))
	dev := loop(t, file, "-r")
	n := testnode.New(t, "", "--allow-device", dev)
	evil := filepath.Join(n.Dir, "evil")
	write(t, evil, "evil")
	ok(t, os.Truncate(evil, size))
	for _, id := range []string{"first", "next"} {
		v := static(id, dev, "")
		ok(t, n.Client.Stage(ctxOf(t), v))
		one, two := n.Target("one"), n.Target("two")
		ok(t, n.Client.Publish(ctxOf(t), v, one, true))
		pod(t, one, "change="+evil)
		ok(t, n.Client.Publish(ctxOf(t), v, two, true))
		for _, at := range []string{one, two} {
			if got := beginning(t, at, 4); got != "good" {
				t.Errorf("%s: %s begins with %q", id, at, got)
			}
		}
		pod(t, one, "change="+evil)
		ok(t, n.Client.Unpublish(ctxOf(t), id, one))
		ok(t, n.Client.Unpublish(ctxOf(t), id, two))
		ok(t, n.Client.Unstage(ctxOf(t), id))
		gone(t, dev)
		gone(t, evil)
	}
}

// A01: what a pod changed on a static device is set back by each of these calls, as on a pool's.
func TestA01_AChangedStaticDeviceIsSetBack(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	n := testnode.New(t, "", "--allow-device", dev)
	v, at := static("changed", dev, ""), n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, at, false))
	for name, call := range map[string]func() error{
		"stage":   func() error { return n.Client.Stage(ctxOf(t), v) },
		"publish": func() error { return n.Client.Publish(ctxOf(t), v, at, false) },
		"stats": func() error {
			s, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: at})
			if err == nil && s.GetUsage()[0].GetTotal() != size {
				t.Errorf("the volume has %s", s)
			}
			return err
		},
	} {
		pod(t, at, "status=0,1048576,0")
		ok(t, call())
		if got := sizeOf(t, at); got != fmt.Sprint(size) {
			t.Errorf("after %s the device has %s bytes", name, got)
		}
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, at))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// A01: a partition of a loop device has the ioctls of the whole one, too: a pod that had its node could unbind the whole, and reach the
// other partitions. A reader gets a loop device on top.
func TestA01_APartitionOfALoopDevice(t *testing.T) {
	t.Parallel()
	for flag, refusal := range map[string]string{"": "make a loop device of that part alone", "-r": "publish it read-only"} {
		file, node := filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "part")
		write(t, file, "whole")
		ok(t, os.Truncate(file, size))
		whole := loop(t, file, strings.Fields(flag)...)
		run(t, "addpart", whole, "1", "2048", "2048")
		t.Cleanup(func() { run(t, "delpart", whole, "1") }) // else the next loop device of that number has it
		run(t, "sh", "-c", `mknod "$0" b $(tr : ' ' </sys/block/$1/$1p1/dev)`, node, filepath.Base(whole))
		n := testnode.New(t, "", "--allow-device", node)
		v := static("part", node, "")
		ok(t, n.Client.Stage(ctxOf(t), v))
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("writer"), false), codes.FailedPrecondition, v.ID, node, refusal)
		at := n.Target("reader")
		ok(t, n.Client.Publish(ctxOf(t), v, at, true))
		pod(t, at, "status=0,0,0", "change="+file, "clear")
		if shown := strings.TrimSpace(run(t, "losetup", "-nO", "BACK-FILE", whole)); shown != file {
			t.Errorf("losetup %s: a reader made the whole device show %q", flag, shown)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, at))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		gone(t, node)
	}
}
