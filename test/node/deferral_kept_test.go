package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestC09_ASharesMountIsDeferred(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := csiclient.Volume{ID: "share", MountFlags: []string{"vers=4.2"}, Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "nas.example", "share": "/export", "allowRuntimeAssistedMount": "true"}}
	ok(t, n.Client.Stage(ctxOf(t), v))
	info, deferred, err := publishTo(t, n, v, n.Target("a"), false, "nfs")
	ok(t, err)
	if !deferred || info.Source != "nas.example:/export" || info.Type != "nfs" || info.Options["vers"] != "4.2" {
		t.Errorf("%v %+v", deferred, info)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestC10_D10_NoSecretInADeferral(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	info, _, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	ok(t, err)
	_, _, err = publishTo(t, n, v, n.Target("b"), false, "ext4") // an error is logged with its request
	refused(t, err, codes.FailedPrecondition)
	if out, err := exec.Command("grep", "-r", "hunter2", filepath.Join(n.Dir, "state")).CombinedOutput(); err == nil || len(out) > 0 {
		t.Errorf("in the state: %s", out)
	}
	if strings.Contains(n.Log(), "hunter2") || strings.Contains(info.Source+info.Type, "hunter2") {
		t.Error("in the log or the answer")
	}
	down(t, n, v.ID, n.Target("a"))
}

// A newer driver's deferral: this driver does not start, and so touches nothing.
func TestADeferralOfANewerVersionIsNotTouched(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	_, _, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	ok(t, err)
	n.Stop()
	names, err := filepath.Glob(filepath.Join(n.Dir, "state/deferred/*.json"))
	ok(t, err)
	old := read(t, names[0])
	write(t, names[0], strings.Replace(old, `"version": 1`, `"version": 2`, 1))
	n.Launch()
	if err := n.Wait(); err == nil || !strings.Contains(n.Log(), "use a newer one") {
		t.Errorf("started with %v: %s", err, n.Log())
	}
	write(t, names[0], old)
	n.Start()
	down(t, n, v.ID, n.Target("a"))
}

// C24: runtimes look for targets in the host's mount namespace, which differs from that of a driver
// in a container. Not beside other tests: its namespace would keep their mounts.
func TestC24_ThePlaceholderIsInTheHostsNamespace(t *testing.T) {
	host := exec.Command("unshare", "-m", "--propagation", "private", "sleep", "3600")
	ok(t, host.Start())
	t.Cleanup(func() { _ = host.Process.Kill(); _ = host.Wait() })
	ns := fmt.Sprintf("/proc/%d/ns/mnt", host.Process.Pid)
	own, err := os.Readlink("/proc/self/ns/mnt")
	ok(t, err)
	for there := own; there == own; { // unshare is still running
		there, err = os.Readlink(ns)
		ok(t, err)
	}
	n := testnode.New(t, "", "--host-mount-namespace", ns)
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	_, deferred, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	if !deferred {
		t.Fatal("not deferred")
	}
	if out := run(t, "nsenter", "--mount="+ns, "findmnt", "-no", "SOURCE,PROPAGATION", target); !strings.Contains(out, "crust-deferred") ||
		!strings.Contains(out, "unbindable") {
		t.Errorf("on the host: %s", out)
	}
	elsewhere := t.TempDir()
	if out, err := exec.Command("nsenter", "--mount="+ns, "mount", "--bind", target, elsewhere).CombinedOutput(); err == nil {
		t.Errorf("it was bound there: %s", out)
	}
	n.Restart()
	_, _, err = publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	down(t, n, v.ID, target)
	if out, err := exec.Command("nsenter", "--mount="+ns, "findmnt", "-no", "SOURCE", target).CombinedOutput(); err == nil {
		t.Errorf("left on the host: %s", out)
	}
	// A namespace that cannot be entered is a clear error at the start.
	n.Kill()
	n.Args = []string{"--host-mount-namespace", "/dev/null"}
	n.Launch()
	if err := n.Wait(); err == nil || !strings.Contains(n.Log(), "--host-mount-namespace") {
		t.Errorf("started: %v %s", err, n.Log())
	}
	// A driver that defers nothing does not need it.
	n.Args = append(n.Args, "--runtime-assisted-mounts=false")
	n.Start()
	said(t, n, "volumes that were left to sandboxes before cannot be unpublished")
	n.Stop()
	n.Args = nil
	n.Start()
}
