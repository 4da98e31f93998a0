package announce

import (
	"cmp"
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
)

// The reasons of events about walks.
const (
	groupRuns   = "GroupChangeRuns"   // files are being given to the pod's fsGroup, and the pod waits
	groupDone   = "GroupChangeDone"   // the walk has succeeded
	groupFailed = "GroupChangeFailed" // the walk has failed
)

// longWalk is how long a walk runs before it is reported.
const longWalk = 30 * time.Second

// walk identifies a walk that the driver reported.
type walk struct {
	volume, pod string
	since       time.Time
}

// told records when a walk was reported, and how long it had run then.
type told struct {
	at   time.Time
	took time.Duration
}

// lookAtWalks reports the progress of walks to the pods that wait for them: whenever the running
// time has doubled since the last report, and once an hour, so that a walk of many hours causes few
// events. It also reports the end of a walk that was reported before.
func (a *Announcer) lookAtWalks(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := a.Inventory.DescribeOperations(ctx, &inventory.DescribeOperationsRequest{})
	if status.Code(err) == codes.Unimplemented { // csi-node is of an earlier version
		return nil
	}
	if err != nil {
		return err
	}
	current := map[walk]told{}
	for _, w := range resp.GetWalks() {
		k := walk{w.GetVolume(), w.GetPodUid(), w.GetSince().AsTime()}
		before, known := a.walks[k]
		pod := object("Pod", w.GetPod(), w.GetPodUid())
		if pod == nil || w.GetPodUid() == "" {
			continue
		}
		if w.GetEnded() == nil {
			took := now.Sub(k.since)
			if took >= longWalk && (!known || took >= 2*before.took || now.Sub(before.at) >= repeat) {
				a.tellOf(w, pod, corev1.EventTypeNormal, groupRuns, "its files are being given to the pod's fsGroup for "+
					took.Round(time.Second).String()+", and the pod starts when that is done: "+w.GetProgress())
				before, known = told{now, took}, true
			}
			if known {
				current[k] = before
			}
			continue
		}
		if !known {
			continue
		}
		took := w.GetEnded().AsTime().Sub(k.since).Round(time.Second).String()
		if w.GetFailed() {
			a.tellOf(w, pod, corev1.EventTypeWarning, groupFailed, "its files could not be given to the pod's fsGroup, after "+took+
				"; the event FailedMount and the log of csi-node say why, and the kubelet tries again: "+w.GetProgress())
		} else {
			a.tellOf(w, pod, corev1.EventTypeNormal, groupDone,
				"its files were given to the pod's fsGroup within "+took+": "+w.GetProgress())
		}
	}
	a.walks = current
	return nil
}

func (a *Announcer) tellOf(w *inventory.Walk, pod *corev1.ObjectReference, kind, reason, message string) {
	a.Events.Eventf(pod, kind, reason, "volume %s: %s", cmp.Or(w.GetName(), w.GetVolume()), plain.Text(message, mostText))
}
