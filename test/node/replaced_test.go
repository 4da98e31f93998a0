package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A02: a disk that nobody has open can disappear, and the next disk gets its number. A pod never
// gets the next disk as the volume's.
func TestA02_ADiskThatWasReplacedUnderItsNumber(t *testing.T) {
	for _, fstype := range []string{"", "ext4"} {
		t.Run("file system "+fstype, func(t *testing.T) {
			own := filepath.Join(t.TempDir(), "disk")
			write(t, own, "")
			ok(t, os.Truncate(own, size))
			run(t, "mkfs.ext4", "-q", own)
			dev := loopKept(t, own)
			other := t.TempDir() + "/other"
			run(t, "cp", "--sparse=always", own, other)
			n := testnode.New(t, "", "--allow-device", dev)
			v := static("replaced", dev, fstype)
			ok(t, n.Client.Stage(ctxOf(t), v))
			change := func(to string) {
				t.Helper()
				run(t, "losetup", "-d", dev)
				run(t, "losetup", dev, to)
			}
			change(other)
			before := sum(t, other)
			refuses := func() {
				t.Helper()
				refused(t, n.Client.Publish(ctxOf(t), v, n.Target("pod"), false), codes.FailedPrecondition, v.ID, "is the disk", "unstage")
				refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, "is the disk", "unstage")
			}
			refuses()
			n.Restart()
			refuses()
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			if sum(t, other) != before {
				t.Error("the other disk was written to")
			}
			b, err := os.ReadFile("/sys/block/" + strings.TrimPrefix(dev, "/dev/") + "/loop/backing_file")
			if err != nil || !strings.Contains(string(b), other) {
				t.Errorf("the other disk was taken away: %s, %v", b, err)
			}
			change(own)
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("pod"), false))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("pod")))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		})
	}
}

// loopKept makes a loop device whose number nobody else gets while the test has detached it. The kernel gives out the lowest number that is
// free, and below this one some are.
func loopKept(t testing.TB, over string) (dev string) {
	t.Helper()
	const spare, tries = 8, 100
	for range tries {
		all, err := filepath.Glob("/sys/block/loop*")
		ok(t, err)
		first := 0
		for _, dir := range all {
			n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "loop"))
			ok(t, err)
			first = max(first, n+1)
		}
		for i := range spare + 1 {
			nodeOf(t, fmt.Sprint("loop", first+i))
		}
		dev := fmt.Sprint("/dev/loop", first+spare)
		if exec.Command("losetup", dev, over).Run() != nil {
			continue // another test found the same numbers
		}
		t.Cleanup(func() {
			run(t, "losetup", "-d", dev)
			removeLoops(t, first, spare+1)
		})
		return dev
	}
	t.Fatal("no loop device")
	return ""
}

// removeLoops removes loop devices that nobody uses, so that runs of the tests do not make more and more of them.
func removeLoops(t testing.TB, first, count int) {
	t.Helper()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	ok(t, err)
	defer ctl.Close()
	for i := range count {
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, ctl.Fd(), unix.LOOP_CTL_REMOVE, uintptr(first+i)) // or it is in use
	}
}
