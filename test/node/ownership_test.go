package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// with returns the volume as a pod with that fsGroup uses it.
func with(v csiclient.Volume, group string, attributes ...string) csiclient.Volume {
	v.Group = group
	context := map[string]string{}
	for k, val := range v.Context {
		context[k] = val
	}
	for i := 0; i+1 < len(attributes); i += 2 {
		context[attributes[i]] = attributes[i+1]
	}
	v.Context = context
	return v
}

func owner(t testing.TB, path string) (uid, gid uint32) {
	t.Helper()
	var st syscall.Stat_t
	ok(t, syscall.Lstat(path, &st))
	return st.Uid, st.Gid
}

// asPod runs a shell command as uid 1000 with the group, like a container of a pod with that
// fsGroup.
func asPod(t testing.TB, group uint32, script string) error {
	t.Helper()
	// Only root can walk to the target; the command starts in it.
	dir, command, _ := strings.Cut(script, "\x00")
	f, err := os.Open(dir)
	ok(t, err)
	defer f.Close()
	c := exec.Command("/bin/sh", "-c", command)
	c.Dir = fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000, Groups: []uint32{group}}}
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func in(dir, command string) string { return dir + "\x00" + command }

func TestF01_TheGroupArrivesInTwoWays(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	caps, err := n.Client.NodeGetCapabilities(ctxOf(t), &csi.NodeGetCapabilitiesRequest{})
	ok(t, err)
	if !strings.Contains(caps.String(), "VOLUME_MOUNT_GROUP") {
		t.Error("VOLUME_MOUNT_GROUP is not advertised")
	}
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), with(v, "77"))) // may differ from the publish
	const attr = "csi.storage.k8s.io/pod.fsGroup"
	for _, c := range []struct{ field, attribute string }{{"5000", ""}, {"", "5001"}, {"5002", "5002"}} {
		w := with(v, c.field)
		if c.attribute != "" {
			w = with(v, c.field, attr, c.attribute)
		}
		ok(t, n.Client.Publish(ctxOf(t), w, target, false))
		if _, gid := owner(t, target); fmt.Sprint(gid) != c.field+c.attribute && fmt.Sprint(gid) != c.field {
			t.Errorf("%+v: the root has group %d", c, gid)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	}
	refused(t, n.Client.Publish(ctxOf(t), with(v, "1", attr, "2"), target, false), codes.InvalidArgument, "fsGroup", `"1"`, `"2"`)
	for _, bad := range []string{"-1", "1.0", "0x10", "010", "staff", "4294967295", "99999999999", "1 "} {
		refused(t, n.Client.Publish(ctxOf(t), with(v, bad), target, false), codes.InvalidArgument, "group")
		refused(t, n.Client.Publish(ctxOf(t), with(v, "", attr, bad), target, false), codes.InvalidArgument, "group")
		refused(t, n.Client.Stage(ctxOf(t), with(v, bad)), codes.InvalidArgument, "group")
	}
	down(t, n, v.ID)
}

func TestF01_PolicyFileLeavesItToTheKubelet(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--fsgroup-policy", "File")
	caps, err := n.Client.NodeGetCapabilities(ctxOf(t), &csi.NodeGetCapabilitiesRequest{})
	ok(t, err)
	if strings.Contains(caps.String(), "VOLUME_MOUNT_GROUP") {
		t.Error("VOLUME_MOUNT_GROUP is advertised")
	}
	v, target := up(t, n, "a", with(csiclient.Volume{FSType: "ext4"}, "", "csi.storage.k8s.io/pod.fsGroup", "5000"))
	if _, gid := owner(t, target); gid != 0 {
		t.Errorf("group %d", gid)
	}
	refused(t, n.Client.Publish(ctxOf(t), with(v, "5000"), n.Target("b"), false), codes.InvalidArgument, "--fsgroup-policy")
	down(t, n, v.ID, target)
}

func TestF02_APodWritesAsItsGroup(t *testing.T) {
	t.Parallel()
	for _, strategy := range []string{"chown", "idmap"} {
		for _, fstype := range filesystems {
			t.Run(strategy+"/"+fstype, func(t *testing.T) {
				n := testnode.New(t, "")
				v := with(create(t, n, "a", csiclient.Volume{FSType: fstype}), "4242", "fsGroupStrategy", strategy)
				target := n.Target("a")
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), with(v, ""), target, false))
				ok(t, os.MkdirAll(target+"/old/deep", 0o700))
				ok(t, os.WriteFile(target+"/old/deep/file", []byte("x"), 0o600))
				ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
				ok(t, n.Client.Publish(ctxOf(t), v, target, false))
				ok(t, asPod(t, 4242, in(target, "echo more >> old/deep/file && mkdir new && touch new/file && rm old/deep/file")))
				if _, gid := owner(t, target+"/new/file"); gid != 4242 {
					t.Errorf("a new file has group %d", gid)
				}
				if err := asPod(t, 4243, in(target, "touch x")); err == nil {
					t.Error("another group wrote")
				}
				down(t, n, v.ID, target)
			})
		}
	}
}

// F02: two pods with different groups use one volume at once. Each sees its own group, and the disk
// has one.
func TestF02_TwoGroupsAtOnceByIdmap(t *testing.T) {
	t.Parallel()
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			n := testnode.New(t, "")
			v := with(create(t, n, "v", csiclient.Volume{FSType: fstype, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}),
				"", "fsGroupStrategy", "idmap")
			a, b, plain := n.Target("a"), n.Target("b"), n.Target("plain")
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "3000"), a, false))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "2000"), b, false))
			ok(t, n.Client.Publish(ctxOf(t), v, plain, false))
			ok(t, asPod(t, 3000, in(a, "echo a > a")))
			ok(t, asPod(t, 2000, in(b, "echo b >> a && echo b > b")))
			ok(t, asPod(t, 3000, in(a, "echo a >> b")))
			for path, want := range map[string]uint32{a + "/a": 3000, a + "/b": 3000, b + "/a": 2000, b + "/b": 2000, plain + "/b": 3000} {
				if _, gid := owner(t, path); gid != want {
					t.Errorf("%s has group %d, want %d", path, gid, want)
				}
			}
			if err := asPod(t, 2000, in(a, "touch no")); err == nil {
				t.Error("the other pod's group writes in this pod's view")
			}
			n.Restart()
			ok(t, n.Client.Publish(ctxOf(t), with(v, "2000"), b, false)) // repeated
			down(t, n, v.ID, a, b, plain)
		})
	}
}

func TestF06_NothingIsChangedUnasked(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	ok(t, os.WriteFile(target+"/file", nil, 0o600))
	var before, after syscall.Stat_t
	ok(t, syscall.Lstat(target+"/file", &before))
	ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), n.Target("ro"), true))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("none"), false))
	ok(t, syscall.Lstat(target+"/file", &after))
	if before.Ctim != after.Ctim || before.Gid != after.Gid || before.Mode != after.Mode {
		t.Errorf("changed from %+v to %+v", before, after)
	}
	down(t, n, v.ID, n.Target("ro"), n.Target("none"), target)
}

func TestF05_PoliciesOfClassAndPod(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "v", size, csiclient.Volume{FSType: "ext4"},
		map[string]string{"fsGroupChangePolicy": "Always", "fsGroupStrategy": "chown"}, nil)
	ok(t, err)
	v := with(csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4", Context: made.GetVolumeContext()}, "4242")
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	again := func(attributes ...string) uint32 {
		ok(t, n.Client.Publish(ctxOf(t), with(v, "4242", attributes...), target, false))
		ok(t, os.WriteFile(target+"/file", nil, 0o600))
		ok(t, os.Chown(target+"/file", 0, 7))
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Publish(ctxOf(t), with(v, "4242", attributes...), target, false))
		_, gid := owner(t, target+"/file")
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		return gid
	}
	if gid := again(); gid != 4242 {
		t.Errorf("Always of the class: group %d", gid)
	}
	if gid := again("csi.storage.k8s.io/pod.fsGroupChangePolicy", "OnRootMismatch"); gid != 7 {
		t.Errorf("OnRootMismatch of the pod: group %d", gid)
	}
	refused(t, n.Client.Publish(ctxOf(t), with(v, "1", "csi.storage.k8s.io/pod.fsGroupChangePolicy", "Sometimes"), target, false),
		codes.InvalidArgument, "Sometimes")
	down(t, n, v.ID)
}

// F07: file systems that this kernel lacks are refused clearly. The guests of test/vm have vfat,
// exfat and, with Linux 6.12, ntfs3.
func TestF07_FilesystemsWithoutOwnersTakeTheGroupAsOption(t *testing.T) {
	t.Parallel()
	for fstype, mkfs := range map[string][]string{"vfat": {"mkfs.vfat"}, "exfat": {"mkfs.exfat"}, "ntfs3": {"mkntfs", "-q", "-Q", "-F"}} {
		t.Run(fstype, func(t *testing.T) {
			img := filepath.Join(t.TempDir(), "img")
			run(t, "truncate", "-s", "64M", img)
			dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", img))
			t.Cleanup(func() { run(t, "losetup", "-d", dev) })
			run(t, mkfs[0], append(mkfs[1:], dev)...)
			n := testnode.New(t, "", "--allow-device", "/dev/loop*")
			// the attribute ntfs means ntfs3
			v := csiclient.Volume{ID: "fat", FSType: strings.TrimSuffix(fstype, "3"), Context: map[string]string{"device": dev}}
			target := n.Target("a")
			ok(t, n.Client.Stage(ctxOf(t), with(v, "4242")))
			if f := mounter.ProbeFilesystem(fstype); f.Answer == mounter.No {
				refused(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false), codes.FailedPrecondition, fstype)
				ok(t, n.Client.Unstage(ctxOf(t), v.ID))
				return
			}
			ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false)) // repeated
			if _, gid := owner(t, target); gid != 4242 {
				t.Errorf("the root has group %d", gid)
			}
			ok(t, asPod(t, 4242, in(target, "echo hello > file && mkdir d && cat file")))
			if fstype != "ntfs3" { // it keeps new files' owners; everybody may use its root
				if _, gid := owner(t, target+"/file"); gid != 4242 {
					t.Errorf("group %d", gid)
				}
				if err := asPod(t, 4243, in(target, "cat file")); err == nil {
					t.Error("another group reads it")
				}
			}
			refused(t, n.Client.Publish(ctxOf(t), with(v, "1"), n.Target("b"), false), codes.FailedPrecondition, "gid=4242", "gid=1")
			refused(t, n.Client.Publish(ctxOf(t), with(v, "1", "fsGroupStrategy", "chown"), n.Target("b"), false),
				codes.InvalidArgument, fstype)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		})
	}
}

func fillTree(t testing.TB, dir string, files int) {
	t.Helper()
	for i := range files {
		sub := fmt.Sprintf("%s/d%d", dir, i/500)
		if i%500 == 0 {
			ok(t, os.Mkdir(sub, 0o755))
		}
		ok(t, syscall.Mknod(fmt.Sprintf("%s/f%d", sub, i), syscall.S_IFREG|0o600, 0))
	}
}

func TestF09_ALongWalkOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	address := l.Addr().String()
	ok(t, l.Close())
	n := testnode.New(t, "", "--metrics-address", address)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	const files = 30000
	fillTree(t, target, files)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	leave(t, func(ctx context.Context) error { return n.Client.Publish(ctx, with(v, "4242"), target, false) })
	// The retry finds it running, with its progress, until it finds it done.
	begin, told := time.Now(), false
	for {
		err := n.Client.Publish(ctxOf(t), with(v, "4242"), target, false)
		if err == nil {
			break
		}
		refused(t, err, codes.Aborted, "NodePublishVolume is running")
		told = told || strings.Contains(err.Error(), "files looked at")
		if time.Since(begin) > time.Minute {
			t.Fatal("it does not end")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if !told {
		t.Error("no answer told the progress")
	}
	if _, gid := owner(t, fmt.Sprintf("%s/d%d/f%d", target, (files-1)/500, files-1)); gid != 4242 {
		t.Errorf("the last file has group %d", gid)
	}
	// F08: the metrics show it.
	r, err := http.Get("http://" + address + "/metrics")
	ok(t, err)
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	ok(t, err)
	m := regexp.MustCompile(`crust_ownership_files_changed_total\{strategy="chown"\} ([0-9.e+]+)`).FindStringSubmatch(string(body))
	if m == nil {
		t.Fatalf("no count of changed files in the metrics")
	}
	if changed, err := strconv.ParseFloat(m[1], 64); err != nil || changed < files {
		t.Errorf("%v files were changed: %v", changed, err)
	}
	for _, want := range []string{`crust_ownership_duration_seconds_count{strategy="chown"} 1`,
		`crust_ownership_skipped_total{reason="no-group"}`} {
		if !strings.Contains(string(body), want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
	down(t, n, v.ID, target)
}

// U03: if the runtime will id-map the mount, the driver must not.
func TestU03_NoIdmapWhereTheRuntimeMaps(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := with(create(t, n, "a", csiclient.Volume{FSType: "ext4"}), "", "fsGroupStrategy", "idmap")
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), with(v, "1000"), target, false))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Publish(ctxOf(t), with(v, "2000", "csi.crust.dev/hostUsers", "false"), target, false))
	if _, gid := owner(t, target); gid != 2000 {
		t.Errorf("group %d", gid)
	}
	said(t, n, "user namespace")
	record := make([]byte, 100)
	k, err := syscall.Getxattr(target, "trusted.crust.ownership", record)
	ok(t, err)
	if got := string(record[:k]); got != "v1 group=2000 state=clean" {
		t.Errorf("%q: not by chown", got)
	}
	refused(t, n.Client.Publish(ctxOf(t), with(v, "1", "csi.crust.dev/hostUsers", "maybe"), n.Target("b"), false),
		codes.InvalidArgument, "maybe")
	refused(t, n.Client.Publish(ctxOf(t), with(v, "1", "csi.crust.dev/hostusers", "false"), n.Target("b"), false),
		codes.InvalidArgument, "hostusers")
	down(t, n, v.ID, target)
}
