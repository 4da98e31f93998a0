package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func TestB08_TopShowsVolumesByUse(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "pvc-top", size, csiclient.Volume{FSType: "ext4"}, ofClaim, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4", Group: "4242",
		Context: map[string]string{"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "web-0",
			"csi.storage.k8s.io/pod.uid": "u"}}
	ok(t, n.Client.Stage(ctxOf(t), csiclient.Volume{ID: v.ID, FSType: "ext4", Group: v.Group}))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	const written = 200 << 20
	ok(t, os.WriteFile(filepath.Join(n.Target("a"), "data"), make([]byte, written), 0o644))
	// A volume that nobody uses, with the first id in the order.
	free := "idle-0"
	for i := 1; volume.VolumeID("pool", free) > v.ID; i++ {
		free = fmt.Sprint("idle-", i)
	}
	idle := create(t, n, free, csiclient.Volume{FSType: "ext4"})
	d := create(t, n, "pvc-deferred", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), d))
	_, _, err = publishTo(t, n, d, n.Target("d"), false, "ext4")
	ok(t, err)

	// Without a terminal, top shows everything once.
	out := exits(t, n, 0, []string{"top", "--crust", serveSandbox(t, n.Dir, n.Target("d"))}, "node-1", "PROMISED", "(in its sandbox)",
		"box-7", free)
	if strings.Contains(out, "\x1b") {
		t.Errorf("escapes without a terminal:\n%q", out)
	}
	var order []string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) > 0 && (f[0] == "shop/orders" || f[0] == free || f[0] == "pvc-deferred") {
			order = append(order, f[0])
		}
		if len(f) > 0 && f[0] == "shop/orders" {
			for _, w := range []string{"shop/web-0", "4242", "ext4"} {
				if !strings.Contains(line, w) {
					t.Errorf("not a word of %q: %s", w, line)
				}
			}
			var used, total float64
			if _, err := fmt.Sscanf(strings.Join(f[2:6], " "), "%f MiB %f MiB", &used, &total); err != nil || used < 200 || used > 210 ||
				total >= 512 {
				t.Errorf("used %v MiB of %v, %v: %s", used, total, err, line)
			}
		}
	}
	if len(order) != 3 || order[0] != "shop/orders" {
		t.Errorf("the order is %v:\n%s", order, out)
	}
	exits(t, n, 0, []string{"top", "-o", "json", "--crust", "unix:///none"}, `"deferred": true`, `"for": "shop/orders"`)
	down(t, n, d.ID, n.Target("d"))
	ok(t, n.Client.Delete(ctxOf(t), idle.ID))
	down(t, n, v.ID, n.Target("a"))
}

// terminal returns both ends of a new one.
func terminal(t *testing.T) (screen, process *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	ok(t, err)
	t.Cleanup(func() { screen.Close() })
	ok(t, unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	ok(t, err)
	process, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	ok(t, err)
	t.Cleanup(func() { process.Close() })
	return screen, process
}

// B8: top runs until it is interrupted, even while csi-node is away, and shows changes.
func TestB08_TopRefreshesOnATerminal(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	screen, process := terminal(t)
	c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir(), "top",
		"--interval", "100ms")
	c.Stdout, c.Stderr = process, process
	ok(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() }) // usually it has ended already
	shown := make(chan string, 1000)
	go func() {
		b := make([]byte, 1<<16)
		for {
			k, err := screen.Read(b)
			if err != nil {
				return
			}
			shown <- string(b[:k])
		}
	}()
	waitFor := func(what string) {
		t.Helper()
		all := ""
		for deadline := time.After(time.Minute); !strings.Contains(all, what); {
			select {
			case s := <-shown:
				all += s
			case <-deadline:
				t.Fatalf("%q is not shown:\n%q", what, all)
			}
		}
	}
	waitFor("\x1b[J")
	v := create(t, n, "pvc-later", csiclient.Volume{FSType: "ext4"})
	waitFor("pvc-later")
	n.Kill()
	waitFor("is csi-node running")
	n.Start()
	waitFor("pvc-later")
	ok(t, c.Process.Signal(os.Interrupt))
	ok(t, c.Wait())
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// B8: a hanging mount, here a FUSE file system whose server answers nothing, lies over a pod's
// volume. Only crustctl sees it; csi-node does not. Its child has copies of all mounts, so the test
// runs alone.
func TestB08_CrustctlWaitsForNoMountThatHangs(t *testing.T) {
	n := testnode.New(t, "")
	ids := map[string]string{}
	for _, name := range []string{"pvc-hangs", "pvc-well"} {
		v := create(t, n, name, csiclient.Volume{FSType: "ext4"})
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(name), false))
		ids[name] = v.ID
	}
	crustctl := func(args ...string) string {
		t.Helper()
		fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
		ok(t, err)
		defer fuse.Close()
		script := `mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 none "$0" && exec "$@"`
		args = append([]string{"-c", script, n.Target("pvc-hangs"), testnode.BuildCommand(t, "crustctl", ""), "--endpoint", n.Endpoint(),
			"--kubelet-dir", n.KubeletDir()}, args...)
		c := exec.CommandContext(ctxOf(t), "sh", args...)
		c.ExtraFiles = []*os.File{fuse}
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		out, err := c.CombinedOutput()
		if err != nil {
			t.Errorf("crustctl %v: %v\n%s", args[5:], err, out)
		}
		return string(out)
	}
	out := crustctl("top")
	for line := range strings.Lines(out) {
		hangs, well := strings.HasPrefix(line, "pvc-hangs "), strings.HasPrefix(line, "pvc-well ")
		if (hangs || well) && strings.Contains(line, "does not answer") != hangs {
			t.Errorf("not so: %s", line)
		}
	}
	for _, w := range []string{"pvc-hangs", "pvc-well", "does not answer"} {
		if !strings.Contains(out, w) {
			t.Errorf("not a word of %q:\n%s", w, out)
		}
	}
	if out := crustctl("volume", "show", ids["pvc-hangs"]); !strings.Contains(out, "does not answer") {
		t.Errorf("volume show:\n%s", out)
	}
	for name, id := range ids {
		down(t, n, id, n.Target(name))
	}
}
