package node

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/daemon"
)

// D06: csi-node is stopped while it copies a frozen volume, and the copy takes longer than calls may take then. The copy is cancelled, and
// the volume is thawed before csi-node ends: it is unknown when another starts.
func TestD06_AStopLeavesNothingFrozen(t *testing.T) {
	t.Parallel()
	n, at := switchable(t)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	hung, ended := at.Hang(t, "copy.frozen", func() error {
		_, err := snapshotNow(t, n, v.ID, "s")
		return err
	})
	if !hung {
		t.Fatalf("it was not copied: %v", <-ended)
	}
	ok(t, syscall.Kill(n.PID(), syscall.SIGTERM))
	// The copy's next step sees that it is cancelled.
	step := time.AfterFunc(daemon.StopTimeout+500*time.Millisecond, func() { at.Off(t) })
	defer step.Stop()
	ok(t, n.Wait())
	if exec.Command("fsfreeze", "--unfreeze", target).Run() == nil {
		t.Error("csi-node has ended, and the volume was frozen still")
	}
	at.Off(t)
	<-ended
	n.Start()
	poolGoesOn(t, n, "ext4")
	down(t, n, v.ID, target)
}
