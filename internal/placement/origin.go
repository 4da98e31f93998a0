package placement

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/crust-csi/crust-csi/internal/adoption"
)

var errNotYet = errors.New("not there yet")

// origin is what a claim wants to copy.
type origin struct {
	what string // description for people
	node string // the node that has it; empty if another driver made it
}

// source returns what a claim wants to copy; nil if nothing, or nothing that a driver copies.
func source(claim *corev1.PersistentVolumeClaim) *corev1.TypedObjectReference {
	ref := claim.Spec.DataSourceRef
	if ref == nil {
		return nil // the API server fills it in from dataSource
	}
	if ref.Namespace != nil && *ref.Namespace != claim.Namespace {
		return nil // CrossNamespaceVolumeDataSource: not enabled in the provisioners
	}
	if len(validation.IsDNS1123Subdomain(ref.Name)) > 0 {
		return nil // the API server takes any name, but nothing has such a one
	}
	group := ""
	if ref.APIGroup != nil {
		group = *ref.APIGroup
	}
	switch {
	case group == "" && ref.Kind == "PersistentVolumeClaim", group == "snapshot.storage.k8s.io" && ref.Kind == "VolumeSnapshot":
		return ref
	}
	return nil
}

func (c *Controller) origin(ctx context.Context, claim *corev1.PersistentVolumeClaim) (origin, error) {
	ref := source(claim)
	if ref.Kind == "VolumeSnapshot" {
		return c.ofSnapshot(ctx, claim.Namespace, ref.Name)
	}
	return c.ofClaim(ctx, claim.Namespace, ref.Name)
}

func (c *Controller) ofSnapshot(ctx context.Context, namespace, name string) (origin, error) {
	o := origin{what: "snapshot " + name}
	v1 := c.Snapshots.SnapshotV1()
	snapshot, err := v1.VolumeSnapshots(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return o, fmt.Errorf("%s: %w", o.what, orNotYet(err))
	}
	if snapshot.Status == nil || snapshot.Status.BoundVolumeSnapshotContentName == nil {
		return o, fmt.Errorf("%s: %w", o.what, errNotYet)
	}
	content, err := v1.VolumeSnapshotContents().Get(ctx, *snapshot.Status.BoundVolumeSnapshotContentName, metav1.GetOptions{})
	if err != nil {
		return o, fmt.Errorf("%s: %w", o.what, orNotYet(err))
	}
	if content.Spec.Driver != c.Driver {
		return o, nil
	}
	o.node = content.Labels[adoption.ManagedBy]
	if o.node == "" {
		return o, fmt.Errorf("%s: no node says that it has it: %w", o.what, errNotYet)
	}
	return o, nil
}

// orNotYet treats a missing object as one that does not exist yet: a tenant may name objects that
// will never exist, and they should not fill the log.
func orNotYet(err error) error {
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: %w", errNotYet, err)
	}
	return err
}

func (c *Controller) ofClaim(ctx context.Context, namespace, name string) (origin, error) {
	o := origin{what: "the volume of claim " + name}
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return o, fmt.Errorf("%s: %w", o.what, orNotYet(err))
	}
	if claim.Spec.VolumeName == "" {
		return o, fmt.Errorf("%s: %w", o.what, errNotYet)
	}
	pv, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return o, fmt.Errorf("%s: %w", o.what, orNotYet(err))
	}
	if pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID {
		return o, fmt.Errorf("%s: %w", o.what, errNotYet) // a tenant may name any volume, and learn from an event where it is
	}
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != c.Driver {
		return o, nil
	}
	o.node = nodeOf(pv, "topology."+c.Driver+"/node")
	if o.node == "" {
		return o, fmt.Errorf("%s: PersistentVolume %s names no node: %w", o.what, pv.Name, errNotYet)
	}
	return o, nil
}

// nodeOf returns the single node that a volume's affinity allows.
func nodeOf(pv *corev1.PersistentVolume, key string) string {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil || len(pv.Spec.NodeAffinity.Required.NodeSelectorTerms) != 1 {
		return ""
	}
	for _, e := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions {
		if e.Key == key && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) == 1 {
			return e.Values[0]
		}
	}
	return ""
}
