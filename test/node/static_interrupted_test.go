package node

import (
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D06: a format was interrupted, and the administrator made another file system. The driver takes it, under whatever id, and what the first
// id remembers changes nothing for the other one.
func TestD06_AFormatThatWasInterruptedIsNoDeadEnd(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	n, points := testnode.NewStopped(t, "failpoint", "--allow-device", dev), testnode.NewFailpoints(t)
	n.Env = points.Env()
	n.Begin()
	first := static("first", dev, "ext4")
	hung, done := points.Hang(t, "format.intended", func() error { return n.Client.Stage(ctxOf(t), first) })
	if !hung {
		t.Fatalf("no format was begun: %v", <-done)
	}
	n.Kill()
	<-done
	points.Off(t)
	n.Start()
	run(t, "mkfs.xfs", "-q", dev)
	second := static("second", dev, "xfs")
	ok(t, stagePatiently(t, n, second))
	ok(t, n.Client.Publish(ctxOf(t), second, n.Target("a"), false))
	write(t, n.Target("a")+"/f", "kept")
	ok(t, n.Client.Unpublish(ctxOf(t), second.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), second.ID))
	refused(t, stagePatiently(t, n, first), codes.FailedPrecondition, first.ID, "holds xfs", "ext4 was asked for", "ask for xfs")
	for range 2 {
		ok(t, stagePatiently(t, n, second))
		ok(t, n.Client.Publish(ctxOf(t), second, n.Target("a"), false))
		if got := read(t, n.Target("a")+"/f"); got != "kept" {
			t.Errorf("read %q", got)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), second.ID, n.Target("a")))
		ok(t, n.Client.Unstage(ctxOf(t), second.ID))
		n.Restart()
	}
	refused(t, stagePatiently(t, n, first), codes.FailedPrecondition, "holds xfs")
	run(t, "dd", "if=/dev/urandom", "of="+dev, "bs=1M", "count=1", "conv=notrunc,fsync", "status=none")
	refused(t, stagePatiently(t, n, second), codes.FailedPrecondition, second.ID, "neither blank nor the xfs") // no format of it began
}
