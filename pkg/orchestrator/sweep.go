package orchestrator

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// sweepPause is the pause between two searches for stale records.
const sweepPause = 30 * time.Second

// Sweep removes deferrals that ended without the agent, until ctx ends: while the agent is not
// installed, a kubelet calls the driver directly.
func (a *Agent) Sweep(ctx context.Context) {
	for {
		for _, d := range a.Records.All() {
			if ended, err := a.forgetEnded(ctx, d); err != nil {
				a.Log.Info("a deferral is kept: it cannot be told whether it has ended", "volume_id", d.VolumeID,
					"target", d.Target, "error", err)
			} else if ended {
				a.Log.Info("forgot a deferral that ended without the agent", "volume_id", d.VolumeID, "target", d.Target)
			}
		}
		select {
		case <-time.After(sweepPause):
		case <-ctx.Done():
			return
		}
	}
}

// forgetEnded removes a deferral if its pod is gone and the driver has nothing at its target.
func (a *Agent) forgetEnded(ctx context.Context, d Deferral) (bool, error) {
	if _, err := a.Pods.Get(ctx, d.Pod); !apierrors.IsNotFound(err) {
		return false, err
	}
	done, err := a.exclusive(d.Target)
	if err != nil {
		return false, nil // a call for it is under way: it has not ended
	}
	defer done()
	d, known := a.Records.Get(d.Target) // read again: it may have got its sandbox meanwhile
	if !known {
		return false, nil
	}
	req := &csi.NodeGetVolumeStatsRequest{VolumeId: d.VolumeID, VolumePath: d.Target}
	if err := crust.SetSupportsStats(req, false); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	switch _, err := csi.NewNodeClient(a.Driver).NodeGetVolumeStats(ctx, req); status.Code(err) {
	case codes.NotFound:
	case codes.OK, codes.FailedPrecondition: // it is there
		return false, nil
	default:
		return false, err
	}
	allow, err := a.letGo(ctx, d.Target)
	defer allow()
	if err != nil {
		return false, err
	}
	// No driver looks after this deferral, so the runtime must confirm the release. The task that
	// just ended may have set the sandbox.
	if d, known = a.Records.Get(d.Target); known && d.Sandbox != "" {
		if err := a.runtimes.unpublish(ctx, d); err != nil && status.Code(err) != codes.NotFound {
			return false, err
		}
	}
	return true, a.forget(req.GetVolumePath())
}
