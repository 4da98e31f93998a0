// Package placement has copies made where their origin is. The pools of nodes share nothing, so
// only the node that has the origin can make the copy. A claim for a copy of a snapshot or of
// another claim therefore gets the annotation with which the scheduler chooses a node
// (volume.kubernetes.io/selected-node). Pods follow their claim.
package placement

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
)

// selectedNode is the annotation that the scheduler sets. If a claim has it, the scheduler excludes
// all other nodes, and that node's provisioner makes the volume.
const selectedNode = "volume.kubernetes.io/selected-node"

// patience is the number of tries, some ten seconds, before the log reports what a copy waits for.
const patience = 6

// Config configures a Controller.
type Config struct {
	Client    kubernetes.Interface
	Snapshots snapshots.Interface
	Driver    string // name of the CSI driver
	Events    record.EventRecorder
	Log       *slog.Logger
}

// Controller watches the claims of a cluster. A cluster needs only one.
type Controller struct {
	Config
	claims  cache.SharedIndexInformer
	classes storagelisters.StorageClassLister
	queue   workqueue.TypedRateLimitingInterface[string]
	// A provisioner whose node is full removes the annotation. The number of removals decides how
	// long the claim waits until it gets the annotation again.
	again workqueue.TypedRateLimiter[string]

	mu     sync.Mutex
	placed map[string]types.UID
}

// New returns a controller that does nothing until Run.
func New(cfg Config) *Controller {
	return &Controller{
		Config: cfg,
		queue:  newQueue(),
		again:  workqueue.NewTypedItemExponentialFailureRateLimiter[string](2*time.Second, time.Minute),
		placed: map[string]types.UID{},
	}
}

// Run works until the context ends.
func (c *Controller) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(c.Client, 0, informers.WithTransform(slim))
	c.claims = factory.Core().V1().PersistentVolumeClaims().Informer()
	classes := factory.Storage().V1().StorageClasses()
	c.classes = classes.Lister()
	changed := func(obj any) {
		if claim, ok := obj.(*corev1.PersistentVolumeClaim); ok {
			c.seen(claim)
		}
	}
	if _, err := c.claims.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		UpdateFunc: func(_, obj any) { changed(obj) },
		DeleteFunc: func(obj any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
				c.forget(key)
			}
		},
	}); err != nil {
		return err
	}
	classes.Informer() // requested before the factory starts, so that it starts too
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), c.claims.HasSynced, classes.Informer().HasSynced) {
		return ctx.Err()
	}
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for c.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	c.queue.ShutDown()
	workers.Wait()
	factory.Shutdown()
	return ctx.Err()
}

// slim drops managedFields, often the largest part of a claim: a cluster may have very many claims.
func slim(obj any) (any, error) {
	if claim, ok := obj.(*corev1.PersistentVolumeClaim); ok {
		claim.ManagedFields = nil
	}
	return obj, nil
}

func (c *Controller) seen(claim *corev1.PersistentVolumeClaim) {
	key := claim.Namespace + "/" + claim.Name
	switch {
	case claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil:
		c.forget(key)
	case !waits(claim):
	case c.wasPlaced(key, claim.UID):
		c.queue.AddAfter(key, c.again.When(key))
	default:
		c.queue.Add(key)
	}
}

// waits reports whether a claim is a copy without a chosen node.
func waits(claim *corev1.PersistentVolumeClaim) bool {
	_, chosen := claim.Annotations[selectedNode]
	return claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil && !chosen && source(claim) != nil &&
		claim.Spec.StorageClassName != nil && *claim.Spec.StorageClassName != ""
}

func (c *Controller) wasPlaced(key string, uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, ok := c.placed[key]
	return ok && was == uid
}

func (c *Controller) forget(key string) {
	c.again.Forget(key)
	c.queue.Forget(key)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.placed, key)
}

func (c *Controller) next(ctx context.Context) bool {
	key, shutdown := c.queue.Get()
	if shutdown {
		return false
	}
	defer c.queue.Done(key)
	obj, exists, err := c.claims.GetStore().GetByKey(key)
	if err != nil || !exists {
		c.queue.Forget(key) // a new claim of its name begins anew
		return true
	}
	claim := obj.(*corev1.PersistentVolumeClaim)
	if !waits(claim) {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	switch err := c.place(ctx, claim); {
	case err == nil:
		c.queue.Forget(key)
	case errors.Is(err, errNotYet):
		level := slog.LevelDebug
		if c.queue.NumRequeues(key) == patience {
			level = slog.LevelInfo // once: it takes longer than it should
		}
		c.Log.Log(ctx, level, "a copy is not placed yet", "claim", key, "reason", err)
		c.queue.AddRateLimited(key)
	case apierrors.IsConflict(err), ctx.Err() != nil:
		c.queue.AddRateLimited(key)
	default:
		c.Log.Warn("a copy cannot be placed yet", "claim", key, "error", err)
		c.queue.AddRateLimited(key)
	}
	return true
}

// place chooses the node of a claim, if the claim copies something that the driver made.
func (c *Controller) place(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	class, err := c.classes.Get(*claim.Spec.StorageClassName)
	if err != nil {
		return fmt.Errorf("storage class %s: %w", *claim.Spec.StorageClassName, orNotYet(err))
	}
	if class.Provisioner != c.Driver {
		return nil
	}
	o, err := c.origin(ctx, claim)
	if err != nil || o.node == "" {
		return err
	}
	node, err := c.Client.CoreV1().Nodes().Get(ctx, o.node, metav1.GetOptions{})
	if err != nil {
		if apierrors.IsNotFound(err) {
			c.Events.Eventf(claim, corev1.EventTypeWarning, "OriginAway",
				"%s is on node %s, which the cluster does not have: no other node can make the copy", o.what, o.node)
		}
		return fmt.Errorf("node %s, which has %s: %w", o.node, o.what, err)
	}
	if node.Spec.Unschedulable {
		c.Events.Eventf(claim, corev1.EventTypeWarning, "OriginCordoned",
			"%s is on node %s, which is cordoned: nothing new is made there, and no "+
				"other node can make the copy", o.what, o.node)
		return fmt.Errorf("node %s, which has %s, is cordoned: %w", o.node, o.what, errNotYet)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"resourceVersion": claim.ResourceVersion, "annotations": map[string]string{selectedNode: o.node},
	}})
	if err != nil {
		return err
	}
	key := claim.Namespace + "/" + claim.Name
	if _, err := c.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		return err
	}
	// Record it after the patch. If the scheduler chose a node first, the provisioner gives that
	// choice back, and the claim must be placed at once.
	c.mu.Lock()
	c.placed[key] = claim.UID
	c.mu.Unlock()
	c.Log.Info("a copy is made where its origin is", "claim", key, "origin", o.what, "node", o.node)
	c.Events.Eventf(claim, corev1.EventTypeNormal, "CopyPlaced", "%s is on node %s: the copy is made there, and its pods run there", o.what,
		o.node)
	return nil
}
