// Package adversary tests a hostile pod. A program runs in a real container (runc) as uid 0, with
// no capability, no_new_privs and the seccomp profile that kubelets call RuntimeDefault
// (testdata/seccomp.json is containerd's, Apache-2.0). It gets only its own volume and tries
// everything that its descriptors allow. Afterwards other volumes must be unchanged, every call
// must be answered, and no space may be lost.
package adversary

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

const size = 320 << 20 // xfs needs 300 MiB

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// sandbox runs the program in containers.
type sandbox struct{ dir, runc, pod string }

func newSandbox(t testing.TB) sandbox {
	runc := testnode.Program{Name: "runc", Dir: "../runtimes", Package: "github.com/opencontainers/runc", Tags: "seccomp", Cgo: true}
	pod := testnode.Program{Name: "pod", Package: "./pod"}
	return sandbox{dir: t.TempDir(), runc: runc.Build(t), pod: pod.Build(t)}
}

// attack runs the program on a published volume and returns its output.
func (s sandbox) attack(t testing.TB, name, target string, block bool) string {
	t.Helper()
	bundle := filepath.Join(s.dir, name)
	rootfs := filepath.Join(bundle, "rootfs")
	for _, d := range []string{"proc", "dev", "data", "sys", "tmp"} {
		ok(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	run(t, "cp", s.pod, filepath.Join(rootfs, "pod"))
	b, err := os.ReadFile("testdata/seccomp.json")
	ok(t, err)
	var seccomp map[string]any
	ok(t, json.Unmarshal(b, &seccomp))
	mount := func(dest, kind, src string, options ...string) map[string]any {
		return map[string]any{"destination": dest, "type": kind, "source": src, "options": options}
	}
	mounts := []any{
		mount("/proc", "proc", "proc"), mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"), mount("/tmp", "tmpfs", "tmpfs"),
		mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
	}
	args := []string{"/pod", "files", "/data"}
	devices, allowed := []any{}, []any{map[string]any{"allow": false, "access": "rwm"}}
	if block {
		var st unix.Stat_t
		ok(t, unix.Stat(target, &st))
		major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev)
		args = []string{"/pod", "raw", "/dev/volume"}
		devices = append(devices, map[string]any{"path": "/dev/volume", "type": "b", "major": major, "minor": minor, "fileMode": 0o660})
		allowed = append(allowed, map[string]any{"allow": true, "type": "b", "major": major, "minor": minor, "access": "rwm"})
	} else {
		mounts = append(mounts, mount("/data", "bind", target, "rbind", "rprivate"))
	}
	var namespaces []any
	for _, kind := range []string{"mount", "pid", "ipc", "uts", "network"} {
		namespaces = append(namespaces, map[string]any{"type": kind})
	}
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"user": map[string]any{"uid": 0, "gid": 0}, "args": args, "cwd": "/", "noNewPrivileges": true, "capabilities": map[string]any{},
		},
		"root": map[string]any{"path": "rootfs", "readonly": true}, "mounts": mounts,
		"linux": map[string]any{
			"namespaces": namespaces, "devices": devices, "seccomp": seccomp, "resources": map[string]any{"devices": allowed},
			"maskedPaths":   []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"},
			"readonlyPaths": []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
	if b, err = json.Marshal(spec); err == nil {
		err = os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o644)
	}
	ok(t, err)
	id := fmt.Sprintf("crust-adversary-%d-%s", os.Getpid(), name)
	out, err := exec.Command(s.runc, "--root", filepath.Join(s.dir, "state"), "run", "--bundle", bundle, id).CombinedOutput()
	if err != nil {
		_ = exec.Command(s.runc, "--root", filepath.Join(s.dir, "state"), "delete", "--force", id).Run() // if it was created
		t.Errorf("%s: %v", name, err)
	}
	return string(out)
}

// pool starts a node whose pool has its own file system.
func pool(t testing.TB) *testnode.Node {
	dir := t.TempDir()
	disk, at := filepath.Join(dir, "disk"), filepath.Join(dir, "pool")
	ok(t, os.Mkdir(at, 0o755))
	ok(t, os.WriteFile(disk, nil, 0o600))
	ok(t, os.Truncate(disk, 8<<30))
	run(t, "mkfs.xfs", "-q", disk)
	run(t, "mount", "-o", "loop", disk, at)
	t.Cleanup(func() { testnode.Unmount(t, at) })
	n := testnode.NewStopped(t, "")
	n.Pool = at
	n.Begin()
	return n
}

func used(t testing.TB, dir string) int64 {
	t.Helper()
	run(t, "sync", "-f", dir)
	var st unix.Statfs_t
	ok(t, unix.Statfs(dir, &st))
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

func sum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	ok(t, err)
	return fmt.Sprintf("%x", h.Sum(nil))
}

// adversary is a pod, identified by its volume.
type adversary struct {
	csiclient.Volume
	name, target string
}

func up(t testing.TB, n *testnode.Node, name, fstype string, thick bool) adversary {
	t.Helper()
	v := csiclient.Volume{FSType: fstype, Block: fstype == ""}
	parameters := map[string]string{}
	if thick {
		parameters["provisioning"] = "thick"
	}
	made, err := n.Client.Create(ctxOf(t), name, size, v, parameters, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target(name), false))
	return adversary{v, name, n.Target(name)}
}

func (a adversary) down(t testing.TB, n *testnode.Node) {
	t.Helper()
	ok(t, n.Client.Unpublish(ctxOf(t), a.ID, a.target))
	ok(t, n.Client.Unstage(ctxOf(t), a.ID))
	ok(t, n.Client.Delete(ctxOf(t), a.ID))
}

// fill writes known bytes to a victim's volume and returns where.
func fill(t testing.TB, v adversary) string {
	t.Helper()
	path, flags := v.target, os.O_WRONLY
	if !v.Block {
		path, flags = filepath.Join(v.target, "data"), os.O_WRONLY|os.O_CREATE
	}
	f, err := os.OpenFile(path, flags, 0o600)
	ok(t, err)
	block := make([]byte, 1<<20)
	for i := range 64 {
		for j := range block {
			block[j] = byte(i*j + i)
		}
		_, err := f.Write(block)
		ok(t, err)
	}
	ok(t, f.Sync())
	ok(t, f.Close())
	return path
}

func TestAPodWithAVolumeReachesNothingElse(t *testing.T) {
	s := newSandbox(t)
	n := pool(t)
	before := used(t, n.PoolDir())
	// Victims, whose devices lie between the adversaries'.
	victims := map[string]string{}
	var others, all []adversary
	for i, fstype := range []string{"", "ext4", "xfs", "btrfs"} {
		v := up(t, n, fmt.Sprintf("victim%d", i), fstype, false)
		others = append(others, v)
		path := fill(t, v)
		victims[path] = sum(t, path)
		for _, thick := range []bool{false, true} {
			kind := fstype
			if kind == "" {
				kind = "raw"
			}
			all = append(all, up(t, n, fmt.Sprintf("%s-thick-%v", kind, thick), fstype, thick))
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	snapshots := map[string]string{}
	for _, a := range all {
		wg.Go(func() {
			out := s.attack(t, a.name, a.target, a.Block)
			if strings.Contains(out, "REACHED") || !strings.Contains(out, "END\n") {
				t.Errorf("%s: %s", a.name, out)
			}
		})
		wg.Go(func() { // holes are punched meanwhile
			r, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{Name: a.name, SourceVolumeId: a.ID})
			if code := status.Code(err); err != nil && code != codes.FailedPrecondition && code != codes.Aborted {
				t.Errorf("%s: a snapshot: %v", a.name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			snapshots[a.name] = r.GetSnapshot().GetSnapshotId()
		})
	}
	wg.Wait()
	for path, want := range victims {
		if got := sum(t, path); got != want {
			t.Errorf("%s has other bytes", path)
		}
	}
	for _, a := range all {
		stillServed(t, n, a)
		if id := snapshots[a.name]; id != "" {
			_, err := n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: id})
			ok(t, err)
		}
		a.down(t, n)
	}
	for path, want := range victims {
		if got := sum(t, path); got != want {
			t.Errorf("%s has other bytes after the others are gone", path)
		}
	}
	for _, v := range others {
		v.down(t, n)
	}
	const slack = 16 << 20 // for xfs itself
	// xfs frees removed files in the background.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		after := used(t, n.PoolDir())
		if after <= before+slack {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("the pool held %d MiB before and holds %d MiB after\n%s", before>>20, after>>20, run(t, "find", n.PoolDir(), "-ls"))
			break
		}
	}
}

// stillServed expects an answer to every call on a volume that a pod has attacked.
func stillServed(t testing.TB, n *testnode.Node, a adversary) {
	t.Helper()
	_, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: a.ID, VolumePath: a.target})
	ok(t, err)
	_, err = n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: a.ID, VolumePublishPath: a.target})
	ok(t, err)
	ok(t, n.Client.Publish(ctxOf(t), a.Volume, a.target, false))
	// Without CAP_SYS_RESOURCE an ext4 grows at its next stage.
	if _, err = n.Client.Expand(ctxOf(t), a.ID, size+16<<20, a.target); a.FSType != "ext4" || status.Code(err) != codes.FailedPrecondition {
		ok(t, err)
	}
	// The next pod gets a file system with a group of its own.
	ok(t, n.Client.Unpublish(ctxOf(t), a.ID, a.target))
	ok(t, n.Client.Unstage(ctxOf(t), a.ID))
	next := a.Volume
	if !a.Block {
		next.Group = "4242"
	}
	ok(t, n.Client.Stage(ctxOf(t), next))
	ok(t, n.Client.Publish(ctxOf(t), next, a.target, false))
	if a.Block {
		f, err := os.Open(a.target)
		ok(t, err)
		defer f.Close()
		got := make([]byte, 4)
		if _, err := f.ReadAt(got, size-512); err != nil || string(got) != "mine" {
			t.Errorf("%s: its last bytes are %q, %v", a.name, got, err)
		}
		return
	}
	if _, err := os.Stat(filepath.Join(a.target, "file")); err != nil {
		t.Errorf("%s: %v", a.name, err)
	}
}
