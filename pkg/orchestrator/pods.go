package orchestrator

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	nodelisters "k8s.io/client-go/listers/node/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// SocketAnnotation of a RuntimeClass names the CRUST socket of its handler on
// every node: unix:///run/crust/crust.sock.
const SocketAnnotation = "crust.csi.dev/fs-mgmt-socket"

// Pods looks up this node's pods, and their volumes.
type Pods struct {
	client  kubernetes.Interface
	pods    corelisters.PodLister
	classes nodelisters.RuntimeClassLister
}

// WatchPods watches the pods of a node, and RuntimeClasses, until ctx ends. The API server need not
// run yet; what is not cached is queried.
func WatchPods(ctx context.Context, client kubernetes.Interface, node string) *Pods {
	const resync = 0
	ours := informers.NewSharedInformerFactoryWithOptions(client, resync, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}))
	all := informers.NewSharedInformerFactory(client, resync)
	p := &Pods{client: client, pods: ours.Core().V1().Pods().Lister(), classes: all.Node().V1().RuntimeClasses().Lister()}
	ours.Start(ctx.Done())
	all.Start(ctx.Done())
	return p
}

// askTimeout bounds a query to the API server.
const askTimeout = 10 * time.Second

// hasUID tells whether kubelets call the pod by this uid. For a static pod (of a file on the node) the API server has a mirror pod with a
// uid of its own; this annotation has the static pod's.
func hasUID(pod *corev1.Pod, uid string) bool {
	return string(pod.UID) == uid || pod.Annotations[corev1.MirrorPodAnnotationKey] == uid
}

// Get finds a pod. If another pod has its name now, the error is Kubernetes' NotFound.
func (p *Pods) Get(ctx context.Context, k PodKey) (*corev1.Pod, error) {
	if pod, err := p.pods.Pods(k.Namespace).Get(k.Name); err == nil && hasUID(pod, k.UID) {
		return pod, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pod, err := p.client.CoreV1().Pods(k.Namespace).Get(ctx, k.Name, metav1.GetOptions{})
	if err == nil && !hasUID(pod, k.UID) {
		err = apierrors.NewNotFound(corev1.Resource("pods"), k.Name+" with uid "+k.UID)
	}
	return pod, err
}

// Socket returns the CRUST socket of a pod's RuntimeClass, empty for none.
func (p *Pods) Socket(ctx context.Context, pod *corev1.Pod) (string, error) {
	name := pod.Spec.RuntimeClassName
	if name == nil || *name == "" {
		return "", nil
	}
	c, err := p.classes.Get(*name)
	if err != nil {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		if c, err = p.client.NodeV1().RuntimeClasses().Get(ctx, *name, metav1.GetOptions{}); err != nil {
			return "", err
		}
	}
	return c.Annotations[SocketAnnotation], nil
}

// volume is a pod's use of a PersistentVolume.
type volume struct {
	allowed     bool              // by the StorageClass
	exclusive   bool              // no second pod can have it
	subPaths    map[string]string // see Deferral
	subPathExpr bool              // a container mounts a subPathExpr whose value only the kubelet knows
}

// use returns how a pod uses a PersistentVolume.
func (p *Pods) use(ctx context.Context, pod *corev1.Pod, name string) (volume, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pv, err := p.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return volume{}, err
	}
	// ReadWriteOncePod excludes all other modes.
	v := volume{exclusive: slices.Contains(pv.Spec.AccessModes, corev1.ReadWriteOncePod)}
	var parameters map[string]string
	if pv.Spec.CSI != nil { // made by hand, or the class was deleted since
		parameters = pv.Spec.CSI.VolumeAttributes
	}
	if name := pv.Spec.StorageClassName; name != "" {
		class, err := p.client.StorageV1().StorageClasses().Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			parameters = class.Parameters
		} else if !apierrors.IsNotFound(err) {
			return volume{}, err
		}
	}
	v.allowed = parameters[crust.AllowParameter] == "true"
	if pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.Namespace != pod.Namespace {
		return volume{}, fmt.Errorf("persistent volume %s is not bound to a claim in the pod's namespace", name)
	}
	for _, in := range pod.Spec.Volumes {
		claim := ""
		switch {
		case in.PersistentVolumeClaim != nil:
			claim = in.PersistentVolumeClaim.ClaimName
		case in.Ephemeral != nil:
			claim = pod.Name + "-" + in.Name
		}
		if claim == pv.Spec.ClaimRef.Name {
			v.noteSubPaths(pod, in.Name)
		}
	}
	return v, nil
}

// labelled tells whether a pod or one of its containers has SELinux options.
func labelled(pod *corev1.Pod) bool {
	if c := pod.Spec.SecurityContext; c != nil && c.SELinuxOptions != nil {
		return true
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if c.SecurityContext != nil && c.SecurityContext.SELinuxOptions != nil {
			return true
		}
	}
	return false
}
