package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A01: a pod that unbinds its device must not get the next volume's device.
func TestA01_APodCannotUnbindItsDevice(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprint("killed=", killed), func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{Block: true})
			img := image(n, v.ID)
			pod(t, target, "write=mine")
			if killed {
				n.Kill() // the protection must work without the driver
			}
			pod(t, target, "clear")
			pod(t, target, "clear")
			if killed {
				n.Start()
			}
			w, other := up(t, n, "b", csiclient.Volume{Block: true})
			pod(t, other, "write=HERS")
			if numberOf(t, target) == numberOf(t, other) {
				t.Errorf("both volumes are device %s", numberOf(t, other))
			}
			if got := beginning(t, target, 4); got != "mine" {
				t.Errorf("the first pod reads %q", got)
			}
			evil := filepath.Join(n.Dir, "evil")
			write(t, evil, "evil")
			ok(t, os.Truncate(evil, size))
			pod(t, target, "clear", "set="+evil, "configure="+evil, "change="+evil, "write=evil")
			if got := beginning(t, other, 4); got != "HERS" {
				t.Errorf("the second pod reads %q", got)
			}
			down(t, n, v.ID, target)
			gone(t, img)
			down(t, n, w.ID, other)
		})
	}
}

// A01: whatever a pod sets, the device stays the volume's. The next call resets it, health reports
// it, and no call treats it as missing.
func TestA01_AChangedDeviceIsStillTheVolumes(t *testing.T) {
	t.Parallel()
	for name, ops := range map[string][]string{
		"limit":      {"status=0,1048576,0"},
		"offset":     {"status=1048576,0,0"},
		"old status": {"old-status=4096,0,0"},
		"autoclear":  {"status=0,0,4"},
		"clear":      {"clear"},
		"block size": {"blocksize=4096"},
		"everything": {"capacity", "direct=0", "blocksize=4096", "status=4096,8192,12", "readonly", "readwrite", "reread", "clear"},
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restarted=%v", name, restarted), func(t *testing.T) {
				t.Parallel()
				n := testnode.New(t, "")
				v, target := up(t, n, "a", csiclient.Volume{Block: true})
				img := image(n, v.ID)
				pod(t, target, "write=mine")
				changed := false
				for _, op := range ops {
					changed = pod(t, target, op)[op] == "done" || changed
				}
				if restarted {
					n.Restart()
				}
				said := health(t, n, v.ID, target)
				if changed != strings.Contains(said, "DeviceChanged") {
					t.Errorf("something was changed: %v; health: %q", changed, said)
				}
				second := n.Target("second")
				ok(t, n.Client.Publish(ctxOf(t), v, second, false))
				for _, at := range []string{target, second} {
					if got := sizeOf(t, at); got != fmt.Sprint(size) {
						t.Errorf("the device has %s bytes, the volume %d", got, size)
					}
					if got := beginning(t, at, 4); got != "mine" {
						t.Errorf("the volume begins with %q", got)
					}
				}
				if got := strings.TrimSpace(run(t, "blockdev", "--getss", target)); got != "512" {
					t.Errorf("sectors of %s bytes", got)
				}
				// Once more, and then straight to the end.
				for _, op := range ops {
					pod(t, target, op)
				}
				down(t, n, v.ID, target, second)
				gone(t, img)
			})
		}
	}
}

// A01: one of two readers of a volume cannot change the other's device.
func TestA01_AReaderCannotChangeAnothersDevice(t *testing.T) {
	t.Parallel()
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprint("restarted=", restarted), func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{Block: true})
			img := image(n, v.ID)
			pod(t, target, "write=good")
			one, two := n.Target("one"), n.Target("two")
			ok(t, n.Client.Publish(ctxOf(t), v, one, true))
			ok(t, n.Client.Publish(ctxOf(t), v, two, true))
			evil := filepath.Join(n.Dir, "evil")
			write(t, evil, "evil")
			ok(t, os.Truncate(evil, size))
			pod(t, one, "change="+evil)
			pod(t, one, "clear", "status=4096,1048576,4", "blocksize=4096")
			if restarted {
				n.Restart()
			}
			if got := beginning(t, two, 4); got != "good" {
				t.Errorf("the other reader reads %q", got)
			}
			if got := sizeOf(t, two); got != fmt.Sprint(size) {
				t.Errorf("the other reader's device has %s bytes", got)
			}
			ok(t, n.Client.Publish(ctxOf(t), v, one, true))
			if got := beginning(t, one, 4); got != "good" {
				t.Errorf("after a repeated publish the first reads %q", got)
			}
			pod(t, one, "change="+evil)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, one))
			if got := beginning(t, two, 4); got != "good" {
				t.Errorf("after the first is gone the other reads %q", got)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, two))
			down(t, n, v.ID, target)
			gone(t, img)
			gone(t, evil)
		})
	}
}

// A01: DeleteVolume answers OK only if no loop device refers to the file, by any name and any part.
func TestA01_DeleteNamesTheLoopThatRefersToTheFile(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{Block: true})
	link := filepath.Join(n.Dir, "link")
	ok(t, os.Link(image(n, v.ID), link))
	loop := strings.TrimSpace(run(t, "losetup", "-f", "--show", "-o", "4096", "--sizelimit", "8192", link))
	held, err := os.Open(loop)
	ok(t, err)
	defer held.Close()
	ok(t, os.Remove(link))
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, loop)
	if _, err := os.Stat(image(n, v.ID)); err != nil {
		t.Errorf("the file: %v", err)
	}
	ok(t, held.Close())
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat("/sys/block/" + filepath.Base(loop) + "/loop"); err != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is bound still", loop)
		}
	}
}

// A01: a volume grows while a pod has it.
func TestA01_APublishedDeviceGrows(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	pod(t, target, "write=mine")
	ro := n.Target("ro")
	ok(t, n.Client.Publish(ctxOf(t), v, ro, true))
	const larger = size + 64<<20
	_, err := n.Client.Expand(ctxOf(t), v.ID, larger, target)
	ok(t, err)
	for _, at := range []string{target, ro} {
		if got := sizeOf(t, at); got != fmt.Sprint(larger) {
			t.Errorf("%s has %s bytes, want %d", at, got, larger)
		}
		if got := beginning(t, at, 4); got != "mine" {
			t.Errorf("it begins with %q", got)
		}
	}
	down(t, n, v.ID, ro, target)
}

// A01: the kubelet locks raw block volumes with its own loop device.
func TestA01_TheKubeletsLoopOnTop(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	img := image(n, v.ID)
	pod(t, target, "write=mine")
	// It mounts the target's node at its own path.
	own := filepath.Join(n.Dir, "kubelets")
	write(t, own, "")
	run(t, "mount", "--bind", target, own)
	kubelets := strings.TrimSpace(run(t, "losetup", "-f", "--show", own))
	pod(t, target, "clear")
	if got := beginning(t, kubelets, 4); got != "mine" {
		t.Errorf("through the kubelet's: %q", got)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "kubelet")
	if got := beginning(t, kubelets, 4); got != "mine" {
		t.Errorf("through the kubelet's, after a refused unstage: %q", got)
	}
	run(t, "losetup", "-d", kubelets)
	testnode.Unmount(t, own)
	down(t, n, v.ID)
	gone(t, img)
}

// A01: a process that outlives its pod still has the device open.
func TestA01_AnOpenDeviceIsNotGivenToTheNext(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	img := image(n, v.ID)
	number := numberOf(t, target)
	own := filepath.Join(t.TempDir(), "node") // a runtime makes its own node
	var st unix.Stat_t
	ok(t, unix.Stat(target, &st))
	ok(t, unix.Mknod(own, unix.S_IFBLK|0o600, int(st.Rdev)))
	c := podCommand(t, own, "clear", "wait")
	stdin, err := c.StdinPipe()
	ok(t, err)
	stdout, err := c.StdoutPipe()
	ok(t, err)
	ok(t, c.Start())
	_, err = stdout.Read(make([]byte, 64)) // it has begun
	ok(t, err)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "open")
	w, other := up(t, n, "b", csiclient.Volume{Block: true})
	if numberOf(t, other) == number {
		t.Errorf("device %s was given to the next volume while a process has it open", number)
	}
	ok(t, stdin.Close())
	ok(t, c.Wait())
	down(t, n, w.ID, other)
	down(t, n, v.ID)
	gone(t, img)
}

func TestA01_TheNodeSaysWhatItGives(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	control, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0) // the node alone may remain from another kernel
	mapped := err == nil
	control.Close()
	want := map[bool]string{true: "raw block volumes: mapped", false: "raw block volumes: held"}[mapped]
	said(t, n, want)
	crustctl := testnode.BuildCommand(t, "crustctl", "")
	out, _ := exec.Command(crustctl, "--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir(), "doctor").CombinedOutput()
	if !strings.Contains(string(out), "raw block volumes") ||
		!strings.Contains(string(out), map[bool]string{true: "mapped", false: "held"}[mapped]) {
		t.Errorf("crustctl doctor:\n%s", out)
	}
	v, target := up(t, n, "a", csiclient.Volume{Block: true})
	if got := health(t, n, v.ID, target); mapped && got != "" || !mapped && got != "RawDeviceHeld" {
		t.Errorf("health: %q", got)
	}
	down(t, n, v.ID, target)
}

// nodeOf makes the node of a loop device if it is missing.
func nodeOf(t testing.TB, name string) {
	t.Helper()
	index, err := strconv.Atoi(strings.TrimPrefix(name, "loop"))
	ok(t, err)
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	ok(t, err)
	defer ctl.Close()
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, ctl.Fd(), unix.LOOP_CTL_ADD, uintptr(index)); e != 0 && e != unix.EEXIST {
		t.Fatal(e)
	}
	if _, err := os.Stat("/dev/" + name); err != nil {
		ok(t, unix.Mknod("/dev/"+name, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(index)))))
	}
}

// A14: the next volume does not inherit a loop device's settings.
func TestA14_TheNextUserOfTheLoopDeviceCanDiscard(t *testing.T) {
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprint("killed=", killed), func(t *testing.T) {
			const tries = 20
			for range tries {
				if nextUserCanDiscard(t, killed) {
					return
				}
				t.Log("another process has got the loop device")
			}
			t.Error("another process always gets the loop device")
		})
	}
}

func nextUserCanDiscard(t *testing.T, killed bool) (tried bool) {
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "thick", size, csiclient.Volume{Block: true},
		map[string]string{"provisioning": "thick"}, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), Block: true}
	ok(t, n.Client.Stage(ctxOf(t), v))
	loops := loopsOf(t, image(n, v.ID))
	if len(loops) != 1 {
		t.Fatalf("loop devices: %v", loops)
	}
	limit := "/sys/block/" + loops[0] + "/queue/discard_max_bytes"
	if got := strings.TrimSpace(read(t, limit)); got != "0" {
		t.Errorf("a thick volume's device discards: %s", got)
	}
	if killed {
		// Somebody else detaches it, so nothing resets it.
		n.Kill()
		run(t, "losetup", "-d", "/dev/"+loops[0])
		gone(t, image(n, v.ID))
		n.Start()
		w := create(t, n, "thin", csiclient.Volume{Block: true})
		ok(t, n.Client.Stage(ctxOf(t), w))
		for _, loop := range loopsOf(t, image(n, w.ID)) {
			if got := strings.TrimSpace(read(t, "/sys/block/"+loop+"/queue/discard_max_bytes")); got == "0" {
				t.Errorf("a thin volume on %s cannot discard", loop)
			}
		}
		down(t, n, w.ID)
	}
	down(t, n, v.ID)
	if killed {
		return true
	}
	file := filepath.Join(n.Dir, "anybodys")
	write(t, file, "x")
	ok(t, os.Truncate(file, 1<<20))
	nodeOf(t, loops[0])
	if exec.Command("losetup", "/dev/"+loops[0], file).Run() != nil {
		return false
	}
	defer run(t, "losetup", "-d", "/dev/"+loops[0])
	if got := strings.TrimSpace(read(t, limit)); got == "0" {
		t.Errorf("the next user of %s cannot discard", loops[0])
	}
	run(t, "blkdiscard", "-f", "/dev/"+loops[0])
	return true
}
