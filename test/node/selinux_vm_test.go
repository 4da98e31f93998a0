//go:build vm

// Tests that need a kernel with SELinux and a loaded policy: the guests of test/vm.

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Types of Debian's policy, which has no container_file_t.
const (
	labelA = "system_u:object_r:svirt_image_t:s0:c1,c2"
	labelB = "system_u:object_r:svirt_image_t:s0:c3,c4"
)

func labelled(v csiclient.Volume, label string) csiclient.Volume {
	v.MountFlags = []string{"context=" + label}
	return v
}

func TestS02_EveryFileHasTheLabel(t *testing.T) {
	for _, name := range filesystems {
		t.Run(name, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{FSType: name, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
			ok(t, os.Mkdir(target+"/dir", 0o755))
			ok(t, os.WriteFile(target+"/dir/old", nil, 0o644))
			before := label(t, target+"/dir/old")
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))

			ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
			ok(t, os.WriteFile(target+"/dir/new", nil, 0o644))
			for _, path := range []string{"", "/dir", "/dir/old", "/dir/new"} {
				if got := label(t, target+path); got != labelA {
					t.Errorf("%q has the label %s", path, got)
				}
			}
			if table := mountinfo(t); !strings.Contains(table, `context="`+labelA+`"`) && !strings.Contains(table, `context=`+labelA) {
				t.Error("the mount table does not show the label")
			}

			// S04: the same label works again: at another target, in another spelling and after a
			// restart. Another label or none does not.
			second := n.Target("b")
			ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), second, true))
			n.Restart()
			ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
			refused(t, n.Client.Publish(ctxOf(t), labelled(v, labelB), n.Target("c"), false), codes.FailedPrecondition, labelA, labelB,
				"mounted elsewhere")
			refused(t, n.Client.Publish(ctxOf(t), v, n.Target("c"), false), codes.FailedPrecondition, labelA)
			// The driver's own mount has the label too.
			_, err := n.Client.NodeGetVolumeStats(ctxOf(t),
				&csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: n.Client.StagingPath(v.ID)})
			ok(t, err)
			_, err = n.Client.Expand(ctxOf(t), v.ID, size*3/2, target)
			switch row := fstype.Of(name); {
			case row.Grow != nil:
				ok(t, err)
			case !row.Grows():
				refused(t, err, codes.OutOfRange, v.ID, "never grows")
			default:
				refused(t, err, codes.FailedPrecondition, v.ID, "only while it is not mounted", "stop its pods")
			}
			_, err = n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
			ok(t, err)
			for _, path := range []string{target, second} {
				ok(t, n.Client.Unpublish(ctxOf(t), v.ID, path))
			}
			// S05: nothing was written to the files.
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			if got := label(t, target+"/dir/old"); got != before {
				t.Errorf("the disk has the label %s, before it was %s", got, before)
			}
			snaps, err := n.Client.ListSnapshots(ctxOf(t), &csi.ListSnapshotsRequest{})
			ok(t, err)
			for _, s := range snaps.GetEntries() {
				_, err := n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: s.GetSnapshot().GetSnapshotId()})
				ok(t, err)
			}
			down(t, n, v.ID, target)
		})
	}
}

// S01: replays the requests of Kubernetes' kubelet for a pod with seLinuxOptions, field by field as
// in 1.36 (csi_attacher.go, csi_mounter.go; AddSELinuxMountOption puts the label into double
// quotes), because a guest has no kubelet.
func TestS01_TheKubeletsRequestsAreReplayed(t *testing.T) {
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "pvc-1", 320<<20,
		csiclient.Volume{FSType: "xfs", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER}, nil, nil)
	ok(t, err)
	id := made.GetVolumeId()
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
			FsType: "xfs", MountFlags: []string{`context="` + labelA + `"`}, VolumeMountGroup: "2000",
		}},
	}
	attributes := map[string]string{"storage.kubernetes.io/csiProvisionerIdentity": "1795265676484-9482-csi.crust.dev-node"}
	staging := n.Client.StagingPath(id)
	ok(t, os.MkdirAll(staging, 0o750)) // the kubelet makes it
	ok(t, os.MkdirAll(filepath.Dir(n.Target("pod")), 0o750))
	_, err = n.Client.NodeStageVolume(ctxOf(t),
		&csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability, VolumeContext: attributes})
	ok(t, err)
	attributes["csi.storage.k8s.io/pod.name"], attributes["csi.storage.k8s.io/pod.namespace"],
		attributes["csi.storage.k8s.io/pod.uid"] = "pod", "default", "8edf0bd3-1f4c-4c9b-9b38-7d1c1ea2f0a7"
	attributes["csi.storage.k8s.io/serviceAccount.name"], attributes["csi.storage.k8s.io/ephemeral"] = "default", "false"
	target := n.Target("pod")
	publish := &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability,
		VolumeContext: attributes}
	for range 2 { // the kubelet repeats it after a restart
		_, err = n.Client.NodePublishVolume(ctxOf(t), publish)
		ok(t, err)
	}
	ok(t, os.WriteFile(target+"/f", nil, 0o644))
	var st syscall.Stat_t
	ok(t, syscall.Stat(target+"/f", &st))
	if got := label(t, target+"/f"); got != labelA || st.Gid != 2000 {
		t.Errorf("label %s, group %d", got, st.Gid)
	}
	down(t, n, id, target)
}

// S01: labels do not depend on the host's /sys/fs/selinux and /etc/selinux. A container of the
// DaemonSet sees neither; a csi-node that runs as a service sees both.
func TestS01_WithTheHostsSELinuxFilesAndWithout(t *testing.T) {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		t.Fatalf("this machine shows no SELinux files: %v", err)
	}
	serveNFS(t)
	for name, under := range map[string][]string{
		"with": nil,
		"without": {"unshare", "-m", "--propagation", "private", "sh",
			"-c", `umount /sys/fs/selinux && mount -t tmpfs none /etc/selinux && exec "$0" "$@"`},
	} {
		t.Run(name, func(t *testing.T) {
			n := testnode.NewStopped(t, "")
			n.Under = under
			n.Begin()
			inside := fmt.Sprintf("/proc/%d/root", n.PID())
			for _, file := range []string{"/sys/fs/selinux/enforce", "/etc/selinux/config"} {
				if _, err := os.Stat(inside + file); (err == nil) != (name == "with") {
					t.Fatalf("the driver sees %s: %v", file, err)
				}
			}
			use := func(v csiclient.Volume) string {
				t.Helper()
				target := n.Target(v.ID)
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
				if got := label(t, inside+target); got != labelA {
					t.Errorf("%s has the label %s", v.ID, got)
				}
				return target
			}
			for _, fstype := range filesystems {
				v := create(t, n, fstype, csiclient.Volume{FSType: fstype})
				down(t, n, v.ID, use(v))
			}
			share := csiclient.Volume{ID: "share", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
				Context: map[string]string{"server": "127.0.0.1", "share": "/"}}
			ok(t, n.Client.Unpublish(ctxOf(t), share.ID, use(share)))
			ok(t, n.Client.Unstage(ctxOf(t), share.ID))
		})
	}
}

// S05: a publish with a label makes equally many calls for any number of files; one with a group
// does not.
func TestS05_ALabelCostsTheSameForAnyNumberOfFiles(t *testing.T) {
	n := testnode.New(t, "")
	calls := func(v csiclient.Volume) (looks int) {
		t.Helper()
		const file = "getdents64,openat,statx,newfstatat,setxattr,fsetxattr,lsetxattr,chown,fchown,fchownat"
		end := n.Tampered(file, "delay_exit=1")
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
		end()
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
		return strings.Count(read(t, filepath.Join(n.Dir, "trace")), "\n")
	}
	v := create(t, n, "a", csiclient.Volume{FSType: "xfs"}) // its groups are found by a walk
	ok(t, n.Client.Stage(ctxOf(t), v))
	few := calls(labelled(v, labelA))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	const files = 500
	fillTree(t, n.Target("a"), files)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	if many := calls(labelled(v, labelB)); many > few+20 {
		t.Errorf("%d calls with no file, %d with %d files", few, many, files)
	}
	if walk := calls(with(v, "4242")); walk < few+files/10 {
		t.Errorf("a walk of %d files is seen as %d calls: the trace misses it", files, walk)
	}
	down(t, n, v.ID)
}

func TestS02_LabelsThatThePolicyDoesNotKnow(t *testing.T) {
	for _, fstype := range filesystems {
		n := testnode.New(t, "")
		v := create(t, n, "a", csiclient.Volume{FSType: fstype})
		ok(t, n.Client.Stage(ctxOf(t), v))
		for _, bad := range []string{"system_u:object_r:no_such_t:s0", "nonsense", "system_u:object_r:svirt_image_t:s99"} {
			err := n.Client.Publish(ctxOf(t), labelled(v, bad), n.Target("a"), false)
			if err == nil || !strings.Contains(err.Error(), bad) {
				t.Errorf("%s: %v", bad, err)
			}
		}
		down(t, n, v.ID)
	}
}

func TestS02_OtherContextOptions(t *testing.T) {
	n := testnode.New(t, "")
	for _, option := range []string{"fscontext", "defcontext", "rootcontext"} {
		v := create(t, n, option, csiclient.Volume{FSType: "ext4", MountFlags: []string{option + "=system_u:object_r:svirt_image_t:s0"}})
		target := n.Target(option)
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		if table := mountinfo(t); !strings.Contains(table, option+"=") {
			t.Errorf("the mount table does not show %s", option)
		}
		down(t, n, v.ID, target)
	}
}

func TestS06_ReadOnlyAndFullVolumes(t *testing.T) {
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	full, err := os.Create(target + "/full")
	ok(t, err)
	buf := make([]byte, 1<<20)
	for {
		if _, err := full.Write(buf); err != nil {
			break
		}
	}
	ok(t, full.Close())
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	for _, readOnly := range []bool{true, false} {
		ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, readOnly))
		if got := label(t, target+"/full"); got != labelA {
			t.Errorf("label %s", got)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	}
	down(t, n, v.ID)
}

// BenchmarkS05_LabelOfManyFiles compares the cost of a label for 100,000 files: a whole publish
// with one, against chcon -R of the same files.
func BenchmarkS05_LabelOfManyFiles(b *testing.B) {
	const files = 100000
	n := testnode.New(b, "")
	made, err := n.Client.Create(ctxOf(b), "many", 2<<30, csiclient.Volume{FSType: "ext4"}, nil, nil)
	ok(b, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	target := n.Target("a")
	ok(b, n.Client.Stage(ctxOf(b), v))
	ok(b, n.Client.Publish(ctxOf(b), v, target, false))
	fillTree(b, target, files)
	begin := time.Now()
	run(b, "chcon", "-R", labelB, target)
	chcon := time.Since(begin)
	var publish time.Duration
	for b.Loop() {
		b.StopTimer()
		ok(b, n.Client.Unpublish(ctxOf(b), v.ID, target))
		b.StartTimer()
		begin = time.Now()
		ok(b, n.Client.Publish(ctxOf(b), labelled(v, labelA), target, false))
		publish = time.Since(begin)
	}
	b.ReportMetric(publish.Seconds()/chcon.Seconds(), "of-chcon")
	b.ReportMetric(chcon.Seconds(), "chcon-s")
	if got := label(b, target+"/d0/f0"); got != labelA {
		b.Errorf("label %s", got)
	}
	down(b, n, v.ID, target)
}

// B08: top shows the label of each mount, and none where there is none.
func TestS02_TopShowsLabels(t *testing.T) {
	n := testnode.New(t, "")
	v, plain := create(t, n, "pvc-labelled", csiclient.Volume{FSType: "ext4"}), create(t, n, "pvc-plain", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), labelled(v, labelA)))
	ok(t, n.Client.Stage(ctxOf(t), plain))
	ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), n.Target("a"), false))
	ok(t, n.Client.Publish(ctxOf(t), plain, n.Target("b"), false))
	out := exits(t, n, 0, []string{"top"}, "LABEL", labelA)
	for line := range strings.Lines(out) {
		if strings.Contains(line, labelA) != strings.Contains(line, "pvc-labelled") {
			t.Errorf("the label of another volume: %s", line)
		}
	}
	exits(t, n, 0, []string{"top", "-o", "json"}, `"`+labelA+`"`)
	down(t, n, v.ID, n.Target("a"))
	down(t, n, plain.ID, n.Target("b"))
}

// unreadableLabels makes the kernel show no label to the running driver, as if a label had been
// silently dropped, until end is called.
func unreadableLabels(t *testing.T, n *testnode.Node) (end func()) {
	t.Helper()
	return n.Tampered("fgetxattr", "error=EOPNOTSUPP")
}

// S03 at both places that mount with a label: block devices and shares. A label that does not
// arrive fails the publish, leaves nothing mounted, and counts as a mismatch (S09), not as a
// conflict or another error.
func TestS03_S09_ALabelThatIsDroppedFailsThePublish(t *testing.T) {
	n, metrics := withMetrics(t)
	dir := serveNFS(t)
	ok(t, os.Mkdir(filepath.Join(dir, "v"), 0o755))
	var volumes []csiclient.Volume
	for _, fstype := range filesystems {
		volumes = append(volumes, create(t, n, fstype, csiclient.Volume{FSType: fstype}))
	}
	volumes = append(volumes, csiclient.Volume{ID: "v", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "127.0.0.1", "share": "/v"}})
	for _, v := range volumes {
		ok(t, n.Client.Stage(ctxOf(t), labelled(v, labelA)))
	}
	before := mountinfo(t)
	end := unreadableLabels(t, n)
	for _, v := range volumes {
		refused(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), n.Target(v.ID), false), codes.FailedPrecondition, "SELinux label",
			labelA, "nothing was mounted")
	}
	end()
	if after := mountinfo(t); after != before {
		t.Errorf("the mount table:\n%s\nbefore:\n%s", after, before)
	}
	const (
		mounts = `crust_selinux_context_mounts_total{access_mode="RWO",outcome="`
		shares = `crust_selinux_context_mounts_total{access_mode="RWX",outcome="`
	)
	m := metrics()
	all := itoa(len(filesystems))
	wantMetric(t, m, mounts+`mismatch"}`, all)
	wantMetric(t, m, shares+`mismatch"}`, "1")
	for _, outcome := range []string{`error"}`, `conflict"}`, `applied"}`} {
		wantMetric(t, m, mounts+outcome, "")
		wantMetric(t, m, shares+outcome, "")
	}
	for _, v := range volumes {
		ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), n.Target(v.ID), false))
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target(v.ID)))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	wantMetric(t, metrics(), mounts+`applied"}`, all)
	wantMetric(t, metrics(), shares+`applied"}`, "1")
	for _, v := range volumes[:len(filesystems)] {
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
	}
}

// S02, C24: a kubelet asks the container runtime to relabel what the mount table shows with `seclabel`. A placeholder cannot be
// relabelled, so the pod would not start.
func TestS02_C24_APlaceholderIsNotRelabelled(t *testing.T) {
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	_, deferred, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	var found bool
	for line := range strings.Lines(mountinfo(t)) {
		if !strings.Contains(line, " "+target+" ") {
			continue
		}
		found = true
		if strings.Contains(line, "seclabel") || !strings.Contains(line, `context=`) {
			t.Errorf("the placeholder: %s", line)
		}
	}
	if !deferred || !found {
		t.Errorf("deferred: %t; in the mount table: %t", deferred, found)
	}
	if st, err := os.Stat(target); err != nil || st.Mode().Perm() != 0 {
		t.Errorf("%v, %v", st, err)
	}
	down(t, n, v.ID, target)
}
