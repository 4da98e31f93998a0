// Package node tests the real csi-node on real loop devices, file systems and mounts, with the
// kubelet's calls.
package node

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

func TestMain(m *testing.M) {
	testnode.AtOnce(8)
	testnode.Main(m)
}

const size = 512 << 20

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused expects an error with that code, whose text contains the words.
func refused(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("want %s, got %v", code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// said waits until the driver's log has the words: it comes through a pipe, but answers come
// through a socket.
func said(t testing.TB, n *testnode.Node, words string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(n.Log(), words); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("the log does not say %q", words)
			return
		}
	}
}

func create(t testing.TB, n *testnode.Node, name string, v csiclient.Volume) csiclient.Volume {
	t.Helper()
	made, err := n.Client.Create(ctxOf(t), name, size, v, nil, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	return v
}

// up creates, stages and publishes.
func up(t testing.TB, n *testnode.Node, name string, v csiclient.Volume) (csiclient.Volume, string) {
	t.Helper()
	v = create(t, n, name, v)
	target := n.Target(name)
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	return v, target
}

// down unpublishes the targets, unstages and deletes.
func down(t testing.TB, n *testnode.Node, id string, targets ...string) {
	t.Helper()
	for _, target := range targets {
		ok(t, n.Client.Unpublish(ctxOf(t), id, target))
		if _, err := os.Lstat(target); !os.IsNotExist(err) {
			t.Errorf("%s is still there after unpublish", target)
		}
	}
	ok(t, n.Client.Unstage(ctxOf(t), id))
	ok(t, n.Client.Delete(ctxOf(t), id))
}

func write(t testing.TB, path, text string) {
	t.Helper()
	ok(t, os.WriteFile(path, []byte(text), 0o644))
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	ok(t, err)
	return string(b)
}

func mountinfo(t testing.TB) string { return read(t, "/proc/self/mountinfo") }

// image returns the volume's file in the pool.
func image(n *testnode.Node, id string) string {
	return filepath.Join(n.PoolDir(), "volumes", strings.TrimPrefix(id, "pool.")+".img")
}

// recordOf returns the volume's record in the pool.
func recordOf(n *testnode.Node, id string) string {
	return strings.TrimSuffix(image(n, id), ".img") + ".json"
}

// leave starts a slow call and abandons it, with ever longer deadlines, until a repeated call is
// answered as already running.
func leave(t testing.TB, call func(context.Context) error) {
	t.Helper()
	for patience := 20 * time.Millisecond; ; patience *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := call(ctx)
		cancel()
		if status.Code(err) == codes.Aborted {
			return
		}
		refused(t, err, codes.DeadlineExceeded)
	}
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	// mkfs.btrfs looks at every mounted loop device, and gives up if another test takes one away meanwhile.
	for try := 0; err != nil && name == "mkfs.btrfs" && strings.Contains(string(out), "cannot check mount status") && try < 100; try++ {
		out, err = exec.Command(name, args...).CombinedOutput()
	}
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// Not beside other tests, which mount.
func TestC02_StageMountsNothing(t *testing.T) {
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	before := mountinfo(t)
	ok(t, n.Client.Stage(ctxOf(t), v))
	if after := mountinfo(t); after != before {
		t.Errorf("the mount table changed:\n%s\n%s", before, after)
	}
	down(t, n, v.ID)
}

func TestDataSurvivesEverything(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{FSType: fs})
			write(t, target+"/f", "kept")
			n.Restart() // kill -9
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), true))
			if got := read(t, n.Target("b")+"/f"); got != "kept" {
				t.Errorf("read %q", got)
			}
			if err := os.WriteFile(n.Target("b")+"/g", nil, 0o644); err == nil {
				t.Error("a read-only publish took a write")
			}
			write(t, target+"/g", "the read-write one still does")
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			n.Stop()
			n.Start()
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			if got := read(t, target+"/f"); got != "kept" {
				t.Errorf("read %q after a new stage", got)
			}
			down(t, n, v.ID, target)
		})
	}
}

func TestBlockReadOnlyCannotBeWritten(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	data := make([]byte, 1<<20)
	rand.Read(data)
	f, err := os.OpenFile(target, os.O_RDWR|os.O_SYNC, 0)
	ok(t, err)
	_, err = f.Write(data)
	ok(t, err)
	ok(t, f.Close())
	ro := n.Target("ro")
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	refused(t, n.Client.Publish(ctxOf(t), v, ro, false), codes.AlreadyExists, "read-only")
	if got := read(t, "/sys/dev/block/"+strings.TrimSpace(run(t, "stat", "-c", "%Hr:%Lr", ro))+"/ro"); strings.TrimSpace(got) != "1" {
		t.Errorf("the kernel does not call the device read-only: %q", got)
	}
	if w, err := os.OpenFile(ro, os.O_WRONLY, 0); err == nil {
		if _, err := w.Write(data); err == nil {
			t.Error("a read-only block publish took a write")
		}
		w.Close()
	}
	r, err := os.Open(ro)
	ok(t, err)
	got := make([]byte, len(data))
	_, err = r.Read(got)
	ok(t, err)
	ok(t, r.Close())
	if string(got) != string(data) {
		t.Error("the read-only device shows other data")
	}
	down(t, n, v.ID, ro, target)
}

func TestRepublishAndConflicts(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	refused(t, n.Client.Publish(ctxOf(t), v, target, true), codes.AlreadyExists, "mounted rw", v.ID)
	noexec := v
	noexec.MountFlags = []string{"noexec"}
	refused(t, n.Client.Publish(ctxOf(t), noexec, target, false), codes.AlreadyExists, "noexec")
	ok(t, n.Client.Publish(ctxOf(t), noexec, n.Target("b"), false))
	if !strings.Contains(mountinfo(t), n.Target("b")+" rw,noexec") {
		t.Errorf("noexec is not on the second mount:\n%s", mountinfo(t))
	}
	sb := v
	sb.MountFlags = []string{"commit=17"}
	refused(t, n.Client.Publish(ctxOf(t), sb, n.Target("c"), false), codes.FailedPrecondition, "commit=17", "share")
	bad := v
	bad.MountFlags = []string{"nosuchoption"}
	refused(t, n.Client.Publish(ctxOf(t), bad, n.Target("d"), false), codes.InvalidArgument, "nosuchoption")
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "still published")
	_, err := n.Client.DeleteVolume(ctxOf(t), &csi.DeleteVolumeRequest{VolumeId: v.ID})
	refused(t, err, codes.FailedPrecondition, "published")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Publish(ctxOf(t), bad, n.Target("d"), false), codes.InvalidArgument, "nosuchoption")
	// The kernel may still be dropping a copy of the mount table, see testnode.PatientUnstage. A refusal while somebody can be found
	// who has the volume is an answer.
	device := strings.TrimSpace(run(t, "losetup", "-n", "-O", "NAME", "-j", image(n, v.ID)))
	err = n.Client.Publish(ctxOf(t), sb, n.Target("c"), false)
	for end := time.Now().Add(time.Minute); status.Code(err) == codes.FailedPrecondition && time.Now().Before(end); {
		holders, herr := testnode.Holders(device)
		ok(t, herr)
		if len(holders) > 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
		err = n.Client.Publish(ctxOf(t), sb, n.Target("c"), false)
	}
	ok(t, err)
	down(t, n, v.ID, n.Target("c"))
}

func TestSingleWriterMode(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER})
	n.Restart()
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, target)
	// Nor does another stage make it a volume for several.
	several := v
	several.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	refused(t, n.Client.Stage(ctxOf(t), several), codes.AlreadyExists, "SINGLE_NODE_SINGLE_WRITER")
	refused(t, n.Client.Publish(ctxOf(t), several, n.Target("b"), false), codes.FailedPrecondition, target)
	ok(t, n.Client.Stage(ctxOf(t), v))
	down(t, n, v.ID, target)
}

func TestReaderOnlyModeIsReadOnly(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "xfs", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY})
	if err := os.WriteFile(target+"/f", nil, 0o644); err == nil {
		t.Error("a volume for readers took a write")
	}
	down(t, n, v.ID, target)
}

// Not beside other tests: its namespace would keep their mounts.
func TestUnstageWaitsForOtherNamespaces(t *testing.T) {
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	// Like a container: the volume is also bound elsewhere, in another namespace.
	elsewhere := t.TempDir()
	holder := exec.Command("unshare", "-m", "--propagation", "private", "sh",
		"-c", `mount --bind "$0" "$1" && touch "$1/ready" && exec sleep 60`, target, elsewhere)
	ok(t, holder.Start())
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(target + "/ready"); err == nil {
			break
		}
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "in use", "mounted elsewhere")
	ok(t, holder.Process.Kill())
	holder.Wait()
	down(t, n, v.ID)
}

func TestNoProgramOnTheWayOfAPublish(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--metrics-address", "127.0.0.1:0")
	for _, fs := range filesystems {
		v := create(t, n, fs, csiclient.Volume{FSType: fs})
		ok(t, n.Client.Stage(ctxOf(t), v)) // formats
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		trace := filepath.Join(t.TempDir(), "trace")
		tracer := exec.Command("strace", "-f", "-qq", "-e", "trace=execve,execveat", "-o", trace, "-p", itoa(n.PID()))
		ok(t, tracer.Start())
		n.Traced()
		target := n.Target(fs)
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		_, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
		ok(t, err)
		if row := fstype.Of(fs); row.Grow != nil && !row.GrowthIsPrivileged { // others grow by a program, or need CAP_SYS_RESOURCE
			_, err = n.Client.Expand(ctxOf(t), v.ID, 2*size, target)
			ok(t, err)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		ok(t, tracer.Process.Signal(os.Interrupt))
		tracer.Wait()
		if got := read(t, trace); strings.Contains(got, "execve") {
			t.Errorf("%s: programs were started:\n%s", fs, got)
		}
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }
