package node

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// C03: the class, the request and the stage say ext4, but the device now holds xfs.
func TestC03_AnotherFileSystemThanWasStaged(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	dev := loopDevice(t, image(n, v.ID))
	run(t, "mkfs.xfs", "-q", "-f", dev)
	before := mountsOf(t, n)
	// A runtime that mounts only ext4 does not get it as ext4.
	info, deferred, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	if err == nil || deferred {
		t.Errorf("an xfs was deferred to a runtime that has ext4 only: %+v", info)
	}
	if after := mountsOf(t, n); after != before {
		t.Errorf("the mount table:\n%s", after)
	}
	info, deferred, err = publishTo(t, n, v, n.Target("a"), false, "ext4", "xfs")
	ok(t, err)
	if !deferred || info.Type != "xfs" {
		t.Errorf("deferred %v: %+v; the device holds xfs", deferred, info)
	}
	down(t, n, v.ID, n.Target("a"))
}

func deviceSize(t *testing.T, dev string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "blockdev", "--getsize64", dev))
}

// C06: the file is larger than its device, as after a kill of the driver in ControllerExpandVolume.
func TestC06_NodeExpandGrowsTheDevice(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	info, deferred, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	if !deferred {
		t.Fatal("not deferred")
	}
	n.Kill()
	ok(t, os.Truncate(image(n, v.ID), 2*size))
	record := recordOf(n, v.ID)
	text := read(t, record)
	larger := strings.Replace(text, fmt.Sprintf(`"sizeBytes": %d`, size), fmt.Sprintf(`"sizeBytes": %d`, 2*size), 1)
	if larger == text {
		t.Fatalf("no size in the record: %s", text)
	}
	write(t, record, larger)
	n.Start()
	if got := deviceSize(t, info.Source); got != fmt.Sprint(size) {
		t.Fatalf("the device has %s bytes before the call", got)
	}
	req := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target, StagingTargetPath: n.Client.StagingPath(v.ID),
		CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}}
	ok(t, crust.SetSupportsExpand(req, true))
	e, err := n.Client.NodeExpandVolume(ctxOf(t), req)
	ok(t, err)
	if got := deviceSize(t, info.Source); got != fmt.Sprint(2*size) || e.GetCapacityBytes() != 2*size {
		t.Errorf("the device has %s bytes, the answer says %d", got, e.GetCapacityBytes())
	}
	if source, err := crust.ExpandSource(e); err != nil || source != info.Source {
		t.Errorf("source %q %v", source, err)
	}
	down(t, n, v.ID, target)
}
