package node

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// crustctl runs the command against the node. It returns the output and whether it succeeded.
func crustctl(t testing.TB, n *testnode.Node, args ...string) (string, bool) {
	t.Helper()
	args = append([]string{"--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir()}, args...)
	var out bytes.Buffer
	c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), args...)
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.String(), err == nil
}

func TestCrustctlThroughTheLifeOfAVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	does := func(want string, args ...string) {
		t.Helper()
		if out, ok := crustctl(t, n, args...); !ok || !strings.Contains(out, want) {
			t.Errorf("crustctl %v: %v %s\nwant %q", args, ok, out, want)
		}
	}
	fails := func(want string, args ...string) {
		t.Helper()
		if out, ok := crustctl(t, n, args...); ok || !strings.Contains(out, want) {
			t.Errorf("crustctl %v: %v %s\nwant a failure with %q", args, ok, out, want)
		}
	}
	does("room in pool pool", "doctor")
	does("512.0 MiB", "volume", "create", "mine", "--size", "512Mi", "--parameter", "csi.storage.k8s.io/fstype=xfs")
	vols, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	id := vols.GetEntries()[0].GetVolume().GetVolumeId()
	a, b := n.Target("a"), n.Target("b")
	fails("--kubelet-dir", "volume", "publish", id, "/elsewhere/mount")
	fails("server, share", "volume", "publish", id, a, "--attribute", "devise=/dev/sda")
	does("published", "volume", "publish", id, a)
	does("published", "volume", "publish", id, b, "--read-only")
	out, _ := crustctl(t, n, "volume", "list")
	for _, want := range []string{"mine", "xfs", a + ", " + b + " (read-only)"} {
		if !strings.Contains(out, want) {
			t.Errorf("list does not show %q:\n%s", want, out)
		}
	}
	does("xfs", "volume", "show", a)
	fails("no pool typo", "volume", "list", "--pool", "typo")
	fails(`size "1.5Gi"`, "volume", "create", "other", "--size", "1.5Gi")
	fails("NAMESPACE/NAME", "history", "--claim", "mine")
	does("--path", "volume", "expand", id, "600Mi")
	does("still published at "+b, "volume", "unpublish", id, a)
	does("unpublished and unstaged", "volume", "unpublish", id, b)
	does("SNAPSHOT", "volume", "snapshot", id, "first")
	does("deleted", "volume", "delete", id)
	// A mistyped id is an error.
	fails("NotFound", "volume", "delete", id)
	fails("NotFound", "volume", "unpublish", id, a)
	snaps, err := n.Client.ListSnapshots(ctxOf(t), &csi.ListSnapshotsRequest{})
	ok(t, err)
	does("deleted", "volume", "delete", snaps.GetEntries()[0].GetSnapshot().GetSnapshotId())
	n.Kill()
	fails("is csi-node running", "doctor")
	n.Start()
}

func TestValidateCapabilitiesOfAStaticVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--allow-device", "/dev/loop*")
	mode := func(v csiclient.Volume, m csi.VolumeCapability_AccessMode_Mode) csiclient.Volume {
		v.Mode = m
		return v
	}
	share := csiclient.Volume{ID: "share", Context: map[string]string{"server": "127.0.0.1", "share": "/s"}}
	for _, c := range []struct {
		v    csiclient.Volume
		want bool
	}{
		{mode(share, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), true},
		{csiclient.Volume{ID: share.ID, Context: share.Context, Block: true}, false},
		{create(t, n, "made", csiclient.Volume{FSType: "ext4"}), true},
		{mode(create(t, n, "made", csiclient.Volume{FSType: "ext4"}), csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), false},
	} {
		r, err := n.Client.ValidateVolumeCapabilities(ctxOf(t), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: c.v.ID, VolumeContext: c.v.Context, VolumeCapabilities: []*csi.VolumeCapability{c.v.Capability()}})
		ok(t, err)
		if got := r.GetConfirmed() != nil; got != c.want {
			t.Errorf("%s %s: confirmed %v, want %v: %s", c.v.ID, c.v.Mode, got, c.want, r.GetMessage())
		}
	}
}

// B7: the effect of a label on a node without SELinux.
func TestB07_ALabelWithoutSELinuxHasNoEffect(t *testing.T) {
	t.Parallel()
	if mounter.SELinux().Answer == mounter.Yes {
		return // TestS02_* cover such a kernel
	}
	n := testnode.New(t, "")
	out, _ := crustctl(t, n, "doctor")
	for _, words := range []string{"pods' SELinux labels have no effect", "mountOptions have context= is refused"} {
		if !strings.Contains(out, words) {
			t.Errorf("the doctor does not say %q:\n%s", words, out)
		}
	}
}

// B6: the doctor checks every pool, and reports one without room as a problem.
func TestB06_TheDoctorSpeaksOfEveryPool(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Args = append(n.Args, "--pool", "other=loop:"+filepath.Join(n.Dir, "other"))
	n.Begin()
	out, well := crustctl(t, n, "doctor")
	for _, words := range []string{"room in pool pool", "room in pool other"} {
		if !strings.Contains(out, words) {
			t.Errorf("the doctor does not say %q:\n%s", words, out)
		}
	}
	if !well {
		t.Errorf("two pools with room:\n%s", out)
	}
	n.Stop()
	unmount()
	n.Start()
	out, well = crustctl(t, n, "doctor")
	if well || !strings.Contains(out, "pool is not at "+n.Pool) || !strings.Contains(out, "hardly: 0") {
		t.Errorf("a pool whose disk is not mounted: %v\n%s", well, out)
	}
	mount()
	n.Restart()
}

// B8: who uses what, with the names that people gave, including those that an earlier process
// recorded.
func TestB08_WhoUsesWhat(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "pvc-0f5a", size, csiclient.Volume{FSType: "ext4"}, map[string]string{
		"csi.storage.k8s.io/pvc/namespace": "shop", "csi.storage.k8s.io/pvc/name": "orders", "csi.storage.k8s.io/pv/name": "pvc-0f5a"}, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	pod := func(name string) csiclient.Volume {
		with := v
		with.Context = map[string]string{"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": name,
			"csi.storage.k8s.io/pod.uid": "u"}
		return with
	}
	ok(t, n.Client.Stage(ctxOf(t), v))
	const uid = "11111111-2222-3333-4444-555555555555"
	a, b, c := n.Target("a"), n.Target("b"), filepath.Join(n.KubeletDir(), "pods", uid, "volumes/kubernetes.io~csi/pvc-0f5a/mount")
	ok(t, os.MkdirAll(filepath.Dir(c), 0o755))
	ok(t, n.Client.Publish(ctxOf(t), pod("web-0"), a, false))
	ok(t, n.Client.Publish(ctxOf(t), pod("report"), b, true))
	ok(t, n.Client.Publish(ctxOf(t), v, c, false)) // in a cluster whose CSIDriver lacks podInfoOnMount
	file, err := os.Stat(image(n, v.ID))
	ok(t, err)
	taken := fmt.Sprintf("%.1f MiB", float64(file.Sys().(*syscall.Stat_t).Blocks*512)/(1<<20))
	says := func(args []string, words ...string) {
		t.Helper()
		out, well := crustctl(t, n, args...)
		for _, w := range words {
			if !well || !strings.Contains(out, w) {
				t.Errorf("%v: %v, not a word of %q:\n%s", args, well, w, out)
			}
		}
	}
	list := []string{"volume", "list"}
	says(list, v.ID, "shop/orders", "512.0 MiB", taken, "shop/web-0, shop/report (read-only)", "pod "+uid)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, c))
	out, _ := crustctl(t, n, list...)
	for line := range strings.Lines(out) {
		if len(line) > 140 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	for _, name := range []string{v.ID, "pvc-0f5a", "shop/orders"} {
		says([]string{"volume", "show", name}, v.ID, "shop/web-0", a, "/dev/loop", "shop/report (read-only)", b)
	}
	says([]string{"pool", "list"}, "pool", "512.0 MiB", "good")
	n.Restart()
	says(list, "shop/web-0, shop/report (read-only)")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, b))
	out, _ = crustctl(t, n, list...)
	if strings.Contains(out, "shop/report") {
		t.Errorf("a pod that has it no more is named:\n%s", out)
	}
	if out, well := crustctl(t, n, "volume", "show", "shop/nothing"); well || !strings.Contains(out, "NotFound") {
		t.Errorf("a claim that is not there: %v %s", well, out)
	}
	down(t, n, v.ID, a)
}

// B8: crustctl finds the socket of the manifests by itself.
func TestB08_TheSocketIsFound(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	usual := filepath.Join(n.KubeletDir(), "plugins/csi.crust.dev/csi.sock")
	ok(t, os.MkdirAll(filepath.Dir(usual), 0o755))
	ok(t, os.Symlink(strings.TrimPrefix(n.Endpoint(), "unix://"), usual))
	c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "--kubelet-dir", n.KubeletDir(), "pool", "list")
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "good") {
		t.Errorf("%v %s", err, out)
	}
}

// B8: with the names that people gave.
func TestB08_VolumesByName(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	does := func(want string, args ...string) {
		t.Helper()
		if out, good := crustctl(t, n, args...); !good || !strings.Contains(out, want) {
			t.Errorf("crustctl %v: %v, without %q:\n%s", args, good, want, out)
		}
	}
	fails := func(want string, args ...string) {
		t.Helper()
		if out, good := crustctl(t, n, args...); good || !strings.Contains(out, want) {
			t.Errorf("crustctl %v: %v, without %q:\n%s", args, good, want, out)
		}
	}
	made, err := n.Client.Create(ctxOf(t), "pvc-1", size, csiclient.Volume{FSType: "xfs"}, ofClaim, nil)
	ok(t, err)
	v, target := csiclient.Volume{ID: made.GetVolumeId(), FSType: "xfs"}, n.Target("a")
	fails("published nowhere", "volume", "stats", "pvc-1")
	fails("no volume of this node", "volume", "stats", "pvc-2")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	for _, name := range []string{"pvc-1", "shop/orders", v.ID} {
		does("good", "volume", "stats", name)
		does("bytes", "volume", "stats", name, target)
	}
	does("1.00 GiB", "volume", "expand", "shop/orders", "1Gi", "--path", target)
	does(v.ID, "volume", "list")
	does("GiB", "volume", "snapshot", "pvc-1", "s")
	does("pool.v", "volume", "clone", "shop/orders", "copy", "--fs-type", "xfs")
	// Another volume of the same claim.
	_, err = n.Client.Create(ctxOf(t), "pvc-3", size, csiclient.Volume{FSType: "ext4"}, ofClaim, nil)
	ok(t, err)
	fails("several volumes", "volume", "stats", "shop/orders")
	fails("several volumes", "volume", "snapshot", "shop/orders", "t")
	fails("not", "volume", "snapshot", "nothing", "t")
	down(t, n, v.ID, target)
	r, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	for _, e := range r.GetEntries() {
		if id := e.GetVolume().GetVolumeId(); id != v.ID {
			ok(t, n.Client.Delete(ctxOf(t), id))
		}
	}
}
