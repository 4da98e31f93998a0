// Package announce reports problems with a node's volumes, and what pods wait for, as Kubernetes
// events on the pods that use the volumes and on their claims.
package announce

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
)

// Config configures an Announcer.
type Config struct {
	Client    kubernetes.Interface
	Inventory inventory.InventoryClient
	Health    csi.NodeClient
	Events    record.EventRecorder
	Log       *slog.Logger
}

// Announcer remembers its events. It repeats an event for a lasting problem once an hour, because
// the API server deletes events after an hour.
type Announcer struct {
	Config
	said  map[key]time.Time
	seen  map[key]time.Time // when each notice was first seen
	walks map[walk]told

	failing time.Duration // how long reads of claims that failed took in this look
}

type key struct {
	volume, pod, reason string
}

const (
	every  = time.Minute
	repeat = time.Hour
	lasts  = 50 * time.Second // minimum age of a notice; shorter problems are gone by the next look

	atOnce   = 8               // volumes queried in parallel
	patience = 5 * time.Second // time for one of them
)

// New returns an Announcer that has reported nothing yet.
func New(cfg Config) *Announcer {
	return &Announcer{Config: cfg, said: map[key]time.Time{}, seen: map[key]time.Time{}, walks: map[walk]told{}}
}

// Run looks once a minute until the context ends.
func (a *Announcer) Run(ctx context.Context) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := a.Look(ctx, time.Now()); err != nil && ctx.Err() == nil {
			a.Log.Warn("the driver's volumes cannot be looked at", "error", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// claimTime is how long the API server has to answer, and how long failed reads of claims may take in one look, together.
const claimTime = 10 * time.Second

// Look asks the driver what pods wait for, and for the health of all volumes that pods use, and
// reports what is new.
func (a *Announcer) Look(ctx context.Context, now time.Time) error {
	if err := a.lookAtWalks(ctx, now); err != nil {
		a.Log.Warn("the driver does not tell what pods wait for", "error", err)
	}
	current := map[key]bool{}
	a.failing = 0
	for after := ""; ; {
		page, err := a.page(ctx, after)
		if err != nil {
			return err
		}
		var used []*inventory.Volume
		for _, v := range page.GetVolumes() {
			if len(v.GetUses()) > 0 {
				used = append(used, v)
			}
		}
		for i, health := range a.healthOf(ctx, used) {
			a.volume(ctx, used[i], health, current, now)
		}
		if after = page.GetAfter(); after == "" {
			break
		}
	}
	gone := func(k key, _ time.Time) bool { return !current[k] }
	maps.DeleteFunc(a.said, gone)
	maps.DeleteFunc(a.seen, gone)
	return nil
}

func (a *Announcer) page(ctx context.Context, after string) (*inventory.DescribeVolumesResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return a.Inventory.DescribeVolumes(ctx, &inventory.DescribeVolumesRequest{After: after})
}

// healthOf queries the health of volumes in parallel: one that hangs delays no other. The answer is
// nil for a volume that gives none.
func (a *Announcer) healthOf(ctx context.Context, volumes []*inventory.Volume) []*csi.NodeGetVolumeHealthResponse {
	health := make([]*csi.NodeGetVolumeHealthResponse, len(volumes))
	var asked errgroup.Group
	asked.SetLimit(atOnce)
	for i, v := range volumes {
		asked.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			var err error
			if health[i], err = a.Health.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.GetId()}); err != nil {
				a.Log.Debug("no health of a volume", "volume", v.GetId(), "error", err) // it may be gone by now
				health[i] = nil
			}
			return nil
		})
	}
	_ = asked.Wait() // none returns an error
	return health
}

func (a *Announcer) volume(ctx context.Context, v *inventory.Volume, resp *csi.NodeGetVolumeHealthResponse, current map[key]bool,
	now time.Time) {
	for _, n := range v.GetNotices() {
		a.wrong(ctx, v, n.GetReason(), n.GetMessage(), lasts, current, now)
	}
	if resp == nil { // nothing is known, so nothing is forgotten
		for k := range a.said {
			if k.volume == v.GetId() {
				current[k] = true
			}
		}
		return
	}
	for _, h := range resp.GetVolumeHealth().GetHealthStatuses() {
		if h.GetStatus() == csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE {
			continue // a state, not a problem
		}
		a.wrong(ctx, v, h.GetReason(), h.GetMessage(), 0, current, now)
	}
}

// wrong reports a lasting problem with a volume on its pods and its claim.
func (a *Announcer) wrong(ctx context.Context, v *inventory.Volume, reason, message string, lasting time.Duration, current map[key]bool,
	now time.Time) {
	due := false
	for _, use := range v.GetUses() {
		k := key{v.GetId(), use.GetPodUid(), reason} // csi-node may have forgotten which pod it is: the claim is known
		current[k] = true
		if _, ok := a.seen[k]; !ok {
			a.seen[k] = now
		}
		if now.Sub(a.seen[k]) < lasting {
			continue
		}
		due = true
		if now.Sub(a.said[k]) < repeat {
			continue
		}
		a.said[k] = now
		if pod := object("Pod", use.GetPod(), use.GetPodUid()); pod != nil && use.GetPodUid() != "" {
			a.say(pod, v, reason, message)
		}
	}
	k := key{v.GetId(), ofClaim, reason}
	current[k] = true
	if due && now.Sub(a.said[k]) >= repeat && a.claim(ctx, v, reason, message) {
		a.said[k] = now
	}
}

// ofClaim stands for a pod in the key of what was said on a claim. It is no uid.
const ofClaim = "the claim"

func object(kind, name, uid string) *corev1.ObjectReference {
	namespace, name, ok := strings.Cut(name, "/")
	if !ok {
		return nil
	}
	return &corev1.ObjectReference{APIVersion: "v1", Kind: kind, Namespace: namespace, Name: name, UID: types.UID(uid)}
}

// claim reports it on the claim too, and returns false if the next look has to try again. It reads the claim's uid, because kubectl
// describe shows no event without it, and because the claim may be a different one by now. A read that fails may say nothing about the
// other claims, as when the API server cannot decode this one. So only time limits how many fail.
func (a *Announcer) claim(ctx context.Context, v *inventory.Volume, reason, message string) (said bool) {
	ref := object("PersistentVolumeClaim", v.GetClaim(), "")
	if ref == nil {
		return true
	}
	if a.failing >= claimTime {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, claimTime)
	defer cancel()
	begin := time.Now()
	claim, err := a.Client.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true
	}
	if err != nil {
		a.failing += time.Since(begin)
		return false
	}
	if claim.Spec.VolumeName == v.GetName() {
		ref.UID = claim.UID
		a.say(ref, v, reason, message)
	}
	return true
}

// mostText leaves room for the volume's name in an event's message of at most 1024 bytes.
const mostText = 700

func (a *Announcer) say(on *corev1.ObjectReference, v *inventory.Volume, reason, message string) {
	a.Events.Eventf(on, corev1.EventTypeWarning, reason, "volume %s: %s", cmp.Or(v.GetName(), v.GetId()), plain.Text(message, mostText))
}
