package node

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A02: a disk that nobody has open can disappear, and the next disk gets its number. A pod never
// gets the next disk as the volume's.
func TestA02_ADiskThatWasReplacedUnderItsNumber(t *testing.T) {
	for _, fstype := range []string{"", "ext4"} {
		t.Run("file system "+fstype, func(t *testing.T) {
			own, dev := disk(t, size)
			run(t, "mkfs.ext4", "-q", own)
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
