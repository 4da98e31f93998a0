package node

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func sumOf(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, io.LimitReader(f, 64<<20)) // superblocks, groups, the journal
	ok(t, err)
	return hex.EncodeToString(h.Sum(nil))
}

// attributed returns a volume with more attributes.
func attributed(v csiclient.Volume, attributes map[string]string) csiclient.Volume {
	v.Context = maps.Clone(v.Context)
	maps.Copy(v.Context, attributes)
	return v
}

var (
	mayMount = map[string]string{"hostMayMount": "true"}
	byHost   = map[string]string{"csi.crust.dev/runtimeKernel": "host"}
)

// visit defers a volume to a pod's runtime and ends the deferral.
func visit(t testing.TB, n *testnode.Node, v csiclient.Volume) {
	t.Helper()
	target := n.Target("visit")
	_, deferred, err := publishTo(t, n, v, target, false, v.FSType)
	ok(t, err)
	if !deferred {
		t.Fatal("not deferred")
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
}

// asAGuest writes what a guest could: the error mark, which requests a check.
func asAGuest(t testing.TB, image string) { run(t, "debugfs", "-w", "-R", "ssv state 2", image) }

// neverParsed expects of a volume that a guest had: it is staged unchanged, refused for anything
// that makes this node parse it, and given to another guest.
func neverParsed(t testing.TB, n *testnode.Node, v csiclient.Volume, image string) {
	t.Helper()
	before := sumOf(t, image)
	ok(t, n.Client.Stage(ctxOf(t), v))
	if after := sumOf(t, image); after != before {
		t.Error("the stage wrote to it")
	}
	if log := n.Log(); strings.Contains(log, "file system check") {
		t.Error("it was checked")
	}
	for _, readOnly := range []bool{false, true} {
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("host"), readOnly), codes.FailedPrecondition, v.ID,
			"given to a guest", "hostMayMount")
	}
	refused(t, stats(ctxOf(t), n, v.ID, n.Client.StagingPath(v.ID)), codes.FailedPrecondition, v.ID, "given to a guest")
	_, err := n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: n.Client.StagingPath(v.ID)})
	refused(t, err, codes.FailedPrecondition, v.ID, "given to a guest")
	// A mount-namespace sandbox uses this kernel, too.
	_, _, err = publishTo(t, n, attributed(v, byHost), n.Target("namespace"), false, v.FSType)
	refused(t, err, codes.FailedPrecondition, v.ID, "given to a guest")
	visit(t, n, v)
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	if after := sumOf(t, image); after != before {
		t.Error("it was written to")
	}
}

func TestA06_WhatAGuestHadIsNotParsedHere(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	visit(t, n, v)
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	asAGuest(t, image(n, v.ID))
	n.Restart() // the fact outlives the driver
	neverParsed(t, n, v, image(n, v.ID))
	// Growth is left to the next guest.
	_, err := n.Client.Expand(ctxOf(t), v.ID, 2*size, "")
	ok(t, err)
	neverParsed(t, n, v, image(n, v.ID))

	// Copies count as a guest's, too.
	s, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
	ok(t, err)
	for name, source := range map[string]*csi.VolumeContentSource{
		"restored": {Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}},
		"clone": {Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}},
	} {
		made, err := n.Client.Create(ctxOf(t), name, 2*size, v, nil, source)
		ok(t, err)
		copied := v
		copied.ID = made.GetVolumeId()
		neverParsed(t, n, copied, image(n, copied.ID))
		ok(t, n.Client.Delete(ctxOf(t), copied.ID))
	}
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: s.GetSnapshot().GetSnapshotId()})
	ok(t, err)

	// If the class allows it, this node does.
	allowed := attributed(v, mayMount)
	ok(t, n.Client.Stage(ctxOf(t), allowed))
	said(t, n, "file system check")
	ok(t, n.Client.Publish(ctxOf(t), allowed, n.Target("host"), false))
	ok(t, stats(ctxOf(t), n, v.ID, n.Target("host")))
	down(t, n, v.ID, n.Target("host"))
}

func TestA06_AClassCarriesHostMayMount(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "a", size, csiclient.Volume{FSType: "ext4"},
		attributed(csiclient.Volume{Context: deferrable}, mayMount).Context, nil)
	ok(t, err)
	if got := made.GetVolumeContext()["hostMayMount"]; got != "true" {
		t.Errorf("the volume's context: %v", made.GetVolumeContext())
	}
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
}

func TestA06_AStaticDeviceThatAGuestHad(t *testing.T) {
	t.Parallel()
	disk := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(disk, nil, 0o600))
	ok(t, os.Truncate(disk, size))
	run(t, "mkfs.ext4", "-q", disk)
	dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", disk))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	n := testnode.New(t, "", "--allow-device", dev)
	v := csiclient.Volume{ID: "disk", FSType: "ext4", Context: map[string]string{"device": dev, "allowRuntimeAssistedMount": "true"}}
	ok(t, n.Client.Stage(ctxOf(t), v))
	visit(t, n, v)
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	asAGuest(t, dev)
	n.Restart()
	neverParsed(t, n, v, dev)
}

// The fact belongs to the disk: another volumeHandle, or a part of the disk, does not lose it.
func TestA06_ADiskThatAGuestHadUnderAnotherHandle(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]func(t *testing.T, file, dev string) string{
		"the same device": func(_ *testing.T, _, dev string) string { return dev },
		"a part of it": func(t *testing.T, file, _ string) string {
			part := loop(t, file, "-o", "16777216")
			run(t, "mkfs.ext4", "-q", "-F", part) // the guest makes partitions
			asAGuest(t, part)
			return part
		},
		"another device on top of the device": func(t *testing.T, _, dev string) string { return loop(t, dev) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file, dev := disk(t, size)
			run(t, "mkfs.ext4", "-q", dev)
			n := testnode.New(t, "", "--allow-device", "/dev/loop*")
			attributes := map[string]string{"allowRuntimeAssistedMount": "true"}
			v := attributed(static("had", dev, "ext4"), attributes)
			ok(t, n.Client.Stage(ctxOf(t), v))
			visit(t, n, v)
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			asAGuest(t, dev)
			n.Restart()
			other := again(t, file, dev)
			neverParsed(t, n, attributed(static("other", other, "ext4"), attributes), other)
		})
	}
}

// The node's disk is full when the fact would be recorded. The kubelet must learn that the volume
// may be deferred, or it would not unpublish it.
func TestA06_AGuestsVolumeWhoseRecordCannotBeWritten(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	run(t, "mkfs.ext4", "-q", dev)
	n := testnode.New(t, "", "--allow-device", dev)
	v := attributed(static("disk", dev, "ext4"), map[string]string{"allowRuntimeAssistedMount": "true"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	records := filepath.Join(filepath.Join(n.Dir, "state"), "static", "devices")
	run(t, "chattr", "+i", records)
	writable := func() { run(t, "chattr", "-i", records) }
	t.Cleanup(writable)
	_, _, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	refused(t, err, codes.Unavailable, v.ID, "given to a guest")
	writable()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestA06_ANamespaceIsNoGuest(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	visit(t, n, attributed(v, byHost))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("host"), false))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("host")))
	_, _, err := publishTo(t, n, attributed(v, map[string]string{"csi.crust.dev/runtimeKernel": "mine"}), n.Target("x"), false, "ext4")
	refused(t, err, codes.InvalidArgument, "runtimeKernel", "host or guest")
	down(t, n, v.ID)
}

// A06: that a guest gets a volume is noted at each hand-out, and written only if it is news.
func TestA06_ASecondGuestWritesNoRecord(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "again", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	written := func() os.FileInfo {
		t.Helper()
		st, err := os.Stat(recordOf(n, v.ID))
		ok(t, err)
		return st
	}
	before := written()
	visit(t, n, v)
	first := written()
	visit(t, n, v)
	if os.SameFile(before, first) || !os.SameFile(first, written()) {
		t.Errorf("the record was written for the first guest: %v, for the second: %v", !os.SameFile(before, first), !os.SameFile(first, written()))
	}
	down(t, n, v.ID)
}
