package node

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// publishTo publishes for a pod whose runtime can mount these file systems.
func publishTo(t testing.TB, n *testnode.Node, v csiclient.Volume, target string, readOnly bool,
	filesystems ...string) (crust.MountInfo, bool, error) {
	t.Helper()
	ok(t, os.MkdirAll(filepath.Dir(target), 0o750))
	req := &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: n.Client.StagingPath(v.ID), TargetPath: target,
		VolumeCapability: v.Capability(), Readonly: readOnly, VolumeContext: v.Context,
		Secrets: map[string]string{"passphrase": "hunter2-" + v.ID},
	}
	ok(t, crust.SetSupportedFilesystems(req, filesystems))
	resp, err := n.Client.NodePublishVolume(ctxOf(t), req)
	if err != nil {
		return crust.MountInfo{}, false, err
	}
	info, deferred, err := crust.MountInfoOf(resp)
	ok(t, err)
	return info, deferred, nil
}

// mountsOf returns the lines of the mount table that belong to this node's volumes.
func mountsOf(t testing.TB, n *testnode.Node) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(mountinfo(t)) {
		if strings.Contains(line, n.Dir) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

var deferrable = map[string]string{"allowRuntimeAssistedMount": "true"}

// claim holds a device as a sandbox does, until release. Afterwards nobody has it, not even a child
// of this process that another test has just started.
func claim(t testing.TB, device string) (release func()) {
	t.Helper()
	held, err := os.OpenFile(device, os.O_RDWR|os.O_EXCL, 0)
	ok(t, err)
	return func() {
		t.Helper()
		ok(t, held.Close())
		for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			f, err := os.OpenFile(device, os.O_RDONLY|os.O_EXCL, 0)
			if err == nil {
				ok(t, f.Close())
				return
			}
			if !errors.Is(err, linux.EBUSY) || time.Since(begin) > time.Minute {
				t.Fatal(err)
			}
		}
	}
}

func TestC01_TheDriverSaysThatItDefers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		flags []string
		want  bool
	}{{nil, true}, {[]string{"--runtime-assisted-mounts=false"}, false}} {
		n := testnode.New(t, "", c.flags...)
		r, err := n.Client.NodeGetCapabilities(ctxOf(t), &csi.NodeGetCapabilitiesRequest{})
		ok(t, err)
		got := false
		for _, c := range r.GetCapabilities() {
			got = got || c.GetRpc().GetType() == crust.NodeCapability
		}
		if got != c.want {
			t.Errorf("%v: %v", c.flags, got)
		}
	}
}

func TestC03_C08_C24_ADeferredVolumeIsMountedNowhereHere(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for _, fs := range filesystems {
		// The class names a file system that the device may not have. The device counts.
		v := create(t, n, fs, csiclient.Volume{FSType: fs, Context: deferrable, MountFlags: []string{"noatime"}})
		ok(t, n.Client.Stage(ctxOf(t), v))
		before := mountsOf(t, n)
		target := n.Target(fs)
		info, deferred, err := publishTo(t, n, v, target, true, "vfat", fs)
		ok(t, err)
		if !deferred || info.Type != fs || !strings.HasPrefix(info.Source, "/dev/loop") {
			t.Fatalf("deferred %v: %+v", deferred, info)
		}
		if _, ro := info.Options["ro"]; !ro || len(info.Options) != 2 {
			t.Errorf("options %v", info.Options)
		}
		if after := mountsOf(t, n); strings.Contains(after, " "+info.Source+" ") ||
			strings.Count(after, "\n") != strings.Count(before, "\n")+1 || !strings.Contains(after, " tmpfs crust-deferred ") {
			t.Errorf("the mount table:\n%s", after)
		}
		// The placeholder: nothing to read, write or bind.
		if st, err := os.Stat(target); err != nil || st.Mode().Perm() != 0 {
			t.Errorf("placeholder %v %v", st, err)
		}
		if err := os.WriteFile(target+"/f", nil, 0o644); err == nil {
			t.Error("the placeholder was written to")
		}
		elsewhere := t.TempDir()
		for _, bind := range []string{"--bind", "--rbind"} {
			if out, err := exec.Command("mount", bind, target, elsewhere).CombinedOutput(); err == nil {
				t.Errorf("%s: the placeholder was bound: %s", bind, out)
				testnode.Unmount(t, elsewhere)
			}
		}
		if h := health(t, n, v.ID, ""); !strings.Contains(h, "DeferredToRuntime") {
			t.Errorf("health: %q", h)
		}
		// This is normal, so that those who report problems leave it out.
		for _, path := range []string{"", target} {
			r, err := n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: path})
			ok(t, err)
			for _, h := range r.GetVolumeHealth().GetHealthStatuses() {
				if h.GetStatus() != csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE {
					t.Errorf("of a volume that is deferred, at %q: %s, %s", path, h.GetStatus(), h.GetReason())
				}
			}
		}
		// The deferral survives a restart, and the same call gets the same answer.
		n.Restart()
		again, deferred, err := publishTo(t, n, v, target, true, fs)
		ok(t, err)
		if !deferred || again.Source != info.Source {
			t.Errorf("the second answer: %v %+v", deferred, again)
		}
		_, _, err = publishTo(t, n, v, target, false, fs)
		refused(t, err, codes.AlreadyExists, "in another way")
		// Others get it only if all of them only read.
		_, _, err = publishTo(t, n, v, n.Target(fs+"2"), false, fs)
		refused(t, err, codes.FailedPrecondition, "deferred", target)
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target(fs+"2"), true), codes.FailedPrecondition, "deferred", target)
		refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, target)
		refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, target)
		_, err = n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: fs})
		refused(t, err, codes.FailedPrecondition, "deferred")
		ok(t, n.Client.Stage(ctxOf(t), v)) // the kubelet repeats it
		down(t, n, v.ID, target)
		if after := mountsOf(t, n); after != before {
			t.Errorf("the mount table after it:\n%s\nbefore:\n%s", after, before)
		}
	}
}

func TestC03_WhatIsOnTheDeviceDecides(t *testing.T) {
	t.Parallel()
	dev := loopOf(t, "xfs")
	s := testnode.New(t, "", "--allow-device", dev)
	v := csiclient.Volume{ID: "static", Context: map[string]string{"device": dev, "allowRuntimeAssistedMount": "true"}, FSType: "xfs"}
	ok(t, s.Client.Stage(ctxOf(t), v))
	v.FSType = "" // nobody names the file system
	info, deferred, err := publishTo(t, s, v, s.Target("a"), false, "ext4", "xfs")
	ok(t, err)
	if !deferred || info.Type != "xfs" {
		t.Errorf("%v %+v", deferred, info)
	}
	ok(t, s.Client.Unpublish(ctxOf(t), v.ID, s.Target("a")))
	ok(t, s.Client.Unstage(ctxOf(t), v.ID))
}

func TestC04_MountedHereUnlessEverythingSaysOtherwise(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for name, c := range map[string]struct {
		context     map[string]string
		filesystems []string
	}{
		"the runtime mounts nothing":           {deferrable, nil},
		"the runtime lacks this file system":   {deferrable, []string{"xfs", "btrfs"}},
		"the class does not allow it":          {nil, []string{"ext4"}},
		"the class says that it is not wanted": {map[string]string{"allowRuntimeAssistedMount": "false"}, []string{"ext4"}},
	} {
		t.Run(name, func(t *testing.T) {
			v := create(t, n, name, csiclient.Volume{FSType: "ext4", Context: c.context})
			ok(t, n.Client.Stage(ctxOf(t), v))
			target := n.Target("a")
			_, deferred, err := publishTo(t, n, v, target, false, c.filesystems...)
			ok(t, err)
			if deferred {
				t.Error("deferred")
			}
			write(t, target+"/f", "mounted here")
			// A volume that is mounted here is not also deferred.
			if len(c.filesystems) == 0 {
				_, _, err = publishTo(t, n, v, n.Target("b"), false, "ext4")
				refused(t, err, codes.FailedPrecondition, "published at "+target)
			}
			down(t, n, v.ID, target)
		})
	}
}

// C19: several sandboxes may share a volume that they only read; nobody writes meanwhile. If the
// node has the volume mounted already, it mounts for another reader too.
func TestC19_ReadersShareADeferredVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: attributed(csiclient.Volume{Context: deferrable}, mayMount).Context})
	ok(t, n.Client.Stage(ctxOf(t), v))
	var targets []string
	source := ""
	for _, name := range []string{"one", "two", "three"} {
		targets = append(targets, n.Target(name))
		info, deferred, err := publishTo(t, n, v, n.Target(name), true, "ext4")
		ok(t, err)
		if _, ro := info.Options["ro"]; !deferred || !ro {
			t.Errorf("%s: deferred %v, %+v", name, deferred, info)
		}
		source = info.Source
	}
	writer := n.Target("writer")
	_, _, err := publishTo(t, n, v, writer, false, "ext4")
	refused(t, err, codes.FailedPrecondition, append([]string{"deferred"}, targets...)...)
	refused(t, n.Client.Publish(ctxOf(t), v, writer, false), codes.FailedPrecondition, "deferred")
	refused(t, n.Client.Publish(ctxOf(t), v, writer, true), codes.FailedPrecondition, "deferred")
	// The sandboxes' mounts keep the device in use. Each target still goes with its pod.
	release := claim(t, source)
	n.Restart()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, targets[0]))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, targets[1]))
	refused(t, n.Client.Unpublish(ctxOf(t), v.ID, targets[2]), codes.FailedPrecondition, "still mounted by the sandbox")
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, targets[2])
	release()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, targets[2]))
	ok(t, n.Client.Publish(ctxOf(t), v, writer, false))
	_, deferred, err := publishTo(t, n, v, targets[0], true, "ext4")
	ok(t, err)
	if deferred {
		t.Error("deferred beside a pod of this node that writes")
	}
	down(t, n, v.ID, writer, targets[0])
}

// C19: a sandbox that has not let go yet holds the device, as QEMU does.
func TestC19_NotMountedHereWhileASandboxHasTheDevice(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: attributed(csiclient.Volume{Context: deferrable}, mayMount).Context})
	ok(t, n.Client.Stage(ctxOf(t), v))
	info, _, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	ok(t, err)
	release := claim(t, info.Source)
	refused(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")), codes.FailedPrecondition, "still mounted by the sandbox", n.Target("a"))
	release()
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	// A sandbox that returns to it.
	release = claim(t, info.Source)
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, "still in use")
	_, _, err = publishTo(t, n, v, n.Target("b"), false, "ext4")
	refused(t, err, codes.FailedPrecondition, "in use")
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "in use")
	release()
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false))
	// Beside what is published here, more may be.
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("c"), true))
	down(t, n, v.ID, n.Target("b"), n.Target("c"))
}

func TestC05_C06_C07_StatsAndGrowthOfADeferredVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	info, _, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	stats := func(supported bool) (*csi.NodeGetVolumeStatsResponse, error) {
		req := &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target}
		ok(t, crust.SetSupportsStats(req, supported))
		return n.Client.NodeGetVolumeStats(ctxOf(t), req)
	}
	r, err := stats(true)
	ok(t, err)
	source, err := crust.StatsSource(r)
	ok(t, err)
	if source != info.Source || len(r.GetUsage()) != 0 {
		t.Errorf("stats: source %q, usage %v", source, r.GetUsage())
	}
	_, err = stats(false)
	refused(t, err, codes.FailedPrecondition, "runtime")
	_, err = n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
	ok(t, err)
	expand := func(supported bool) (*csi.NodeExpandVolumeResponse, error) {
		req := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target, StagingTargetPath: n.Client.StagingPath(v.ID),
			CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}}
		ok(t, crust.SetSupportsExpand(req, supported))
		return n.Client.NodeExpandVolume(ctxOf(t), req)
	}
	before := sum(t, image(n, v.ID))
	_, err = expand(false)
	refused(t, err, codes.FailedPrecondition, "cannot grow")
	e, err := expand(true)
	ok(t, err)
	source, err = crust.ExpandSource(e)
	ok(t, err)
	if source != info.Source || e.GetCapacityBytes() != 2*size {
		t.Errorf("expand: source %q, %d bytes", source, e.GetCapacityBytes())
	}
	if sum(t, image(n, v.ID)) != before {
		t.Error("the node changed the file system")
	}
	down(t, n, v.ID, target)
}
