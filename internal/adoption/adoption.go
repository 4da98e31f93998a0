// Package adoption labels the VolumeSnapshotContents that an administrator made by hand with the
// node that has their snapshot. With a snapshotter on each node (external-snapshotter's
// --node-deployment), a content belongs to the node in its label managed-by. snapshot-controller
// sets the label only on contents that it makes itself; the others would never become ready.
package adoption

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	"github.com/kubernetes-csi/external-snapshotter/client/v8/informers/externalversions"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

// ManagedBy is the label that tells external-snapshotter which node has a snapshot, if each node
// runs a snapshotter (--node-deployment).
const ManagedBy = "snapshot.storage.kubernetes.io/managed-by"

// Config configures Run.
type Config struct {
	Snapshots  snapshots.Interface
	Controller csi.ControllerClient // of this node's driver
	Driver     string               // its name
	Node       string
	Log        *slog.Logger
}

// again is the interval after which contents that nobody took are checked once more: their pool may
// be back.
const again = 10 * time.Minute

// Run works until the context ends. It watches only contents without the label, which are few.
func Run(ctx context.Context, cfg Config) error {
	factory := externalversions.NewSharedInformerFactoryWithOptions(cfg.Snapshots, again,
		externalversions.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = "!" + ManagedBy }))
	contents := factory.Snapshot().V1().VolumeSnapshotContents().Informer()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](time.Second, again))
	changed := func(obj any) {
		if content, ok := obj.(*snapshotv1.VolumeSnapshotContent); ok && cfg.mayBeOurs(content) {
			queue.Add(content.Name)
		}
	}
	if _, err := contents.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: changed,
		UpdateFunc: func(_, obj any) { changed(obj) }}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	go func() {
		<-ctx.Done()
		queue.ShutDown()
	}()
	for {
		name, shutdown := queue.Get()
		if shutdown {
			factory.Shutdown()
			return ctx.Err()
		}
		// It may have been deleted since it was queued, and another created under its name.
		obj, exists, err := contents.GetStore().GetByKey(name)
		if err == nil && exists && cfg.mayBeOurs(obj.(*snapshotv1.VolumeSnapshotContent)) {
			err = cfg.adopt(ctx, obj.(*snapshotv1.VolumeSnapshotContent))
		}
		if err != nil {
			cfg.Log.Warn("a snapshot content that was made by hand cannot be looked at yet", "content", name, "error", err)
			queue.AddRateLimited(name)
		} else {
			queue.Forget(name)
		}
		queue.Done(name)
	}
}

func (cfg Config) mayBeOurs(content *snapshotv1.VolumeSnapshotContent) bool {
	// Include contents that are being deleted: only a snapshotter completes the deletion.
	handle := content.Spec.Source.SnapshotHandle // if it is empty, the driver would list all snapshots
	return content.Spec.Driver == cfg.Driver && content.Labels[ManagedBy] == "" && handle != nil && *handle != ""
}

// adopt labels a content whose snapshot is on this node.
func (cfg Config) adopt(ctx context.Context, content *snapshotv1.VolumeSnapshotContent) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := cfg.Controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: *content.Spec.Source.SnapshotHandle})
	if err != nil {
		return fmt.Errorf("the driver: %w", err)
	}
	if len(resp.GetEntries()) == 0 {
		return nil // another node's, or nobody's
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"resourceVersion": content.ResourceVersion, "labels": map[string]string{ManagedBy: cfg.Node},
	}})
	if err != nil {
		return err
	}
	if _, err := cfg.Snapshots.SnapshotV1().VolumeSnapshotContents().Patch(ctx, content.Name, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		return err
	}
	cfg.Log.Info("a snapshot content that was made by hand is this node's", "content", content.Name, "snapshot",
		*content.Spec.Source.SnapshotHandle)
	return nil
}
