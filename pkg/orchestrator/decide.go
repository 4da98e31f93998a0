package orchestrator

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// decide queries API server, driver and runtime, and completes the deferral with their answers.
func (a *Agent) decide(ctx context.Context, req *csi.NodePublishVolumeRequest, pod *corev1.Pod, d *Deferral) (crust.Decision, error) {
	no := func(why string) (crust.Decision, error) { return crust.Decision{Why: why}, nil }
	ask := crust.PodVolume{Socket: d.Socket, Block: req.GetVolumeCapability().GetBlock() != nil}
	if ask.Block {
		return crust.Decide(ask), nil
	}
	if req.GetVolumeContext()[attrEphemeral] == "true" {
		return no("it is an inline volume of the pod, which has no StorageClass to allow anything else")
	}
	if d.Volume == "" {
		return no("its target path is not one of the kubelet's, so the persistent volume is not known")
	}
	v, err := a.Pods.use(ctx, pod, d.Volume)
	if apierrors.IsNotFound(err) && !strings.HasPrefix(d.Volume, "pvc-") && slices.ContainsFunc(pod.Spec.Volumes, migrates) {
		return no("it has no PersistentVolume: the kubelet hands a volume of the pod's own specification to CSI")
	}
	if err != nil {
		return crust.Decision{}, err
	}
	ask.Allowed, ask.Exclusive, ask.ReadOnly = v.allowed, v.exclusive, readOnly(req)
	offered, err := a.offered(ctx)
	if err != nil {
		return crust.Decision{}, err
	}
	ask.NodeDefers = slices.Contains(offered, crust.NodeCapability)
	ask.SubPath, d.SubPaths = len(v.subPaths) > 0 || v.subPathExpr, v.subPaths
	if c := pod.Spec.SecurityContext; c != nil {
		if c.FSGroup != nil {
			gid := uint32(*c.FSGroup)
			ask.Group, d.Group = true, &gid
		}
		// The pod's policy, or its class's, or the kubelet's default.
		d.GroupPolicy = string(corev1.FSGroupChangeAlways)
		if class := req.GetVolumeContext()[attrPolicy]; class == string(corev1.FSGroupChangeOnRootMismatch) {
			d.GroupPolicy = class // other drivers may have other values
		}
		if c.FSGroupChangePolicy != nil {
			d.GroupPolicy = string(*c.FSGroupChangePolicy)
		}
		ask.GroupPolicy = d.GroupPolicy
	}
	ask.LabelOnMount = slices.ContainsFunc(req.GetVolumeCapability().GetMount().GetMountFlags(),
		func(o string) bool { return strings.HasPrefix(o, "context=") })
	ask.Label = ask.LabelOnMount || labelled(pod) && mounter.SELinux().Answer == mounter.Yes
	// Decide without the runtime first, to spare it volumes that are not for it.
	ask.Capabilities, ask.Filesystems = everything, []string{"any"}
	if decision := crust.Decide(ask); !decision.Defer {
		return decision, nil
	}
	// Kubelets bind sub-paths on the host before they ask the runtime.
	switch {
	case v.subPathExpr:
		return no("the pod uses a subPathExpr of it, and only the kubelet knows its value")
	case ask.SubPath && !slices.Contains(offered, crust.SubPathCapability):
		return no("the pod uses a subPath of it, and the CSI driver's placeholder has no directories for that")
	case ask.SubPath:
		if _, err := d.subPaths(); err != nil {
			return no(err.Error())
		}
	}
	list, supported, err := a.runtimes.supports(ctx, d.Socket)
	if err != nil {
		return crust.Decision{}, fmt.Errorf("the runtime at %s: %w", d.Socket, err)
	}
	ask.Capabilities, ask.Filesystems, d.Filesystems = list, supported.GetFileSystems(), supported.GetFileSystems()
	d.HostKernel = slices.Contains(ask.Capabilities, crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL)
	if users := pod.Spec.HostUsers; ask.SubPath && d.HostKernel && users != nil && !*users {
		// NRI's mounts carry no id mappings: a mount that a plugin changes loses its own.
		return no("the pod uses a subPath of it and has hostUsers: false, and the mount would not be id-mapped")
	}
	return crust.Decide(ask), nil
}

// migrates tells whether kubelets translate a pod's own volume to one of a CSI driver. Such a volume has no PersistentVolume object.
func migrates(v corev1.Volume) bool {
	return v.AWSElasticBlockStore != nil || v.GCEPersistentDisk != nil || v.AzureDisk != nil || v.AzureFile != nil || v.Cinder != nil ||
		v.VsphereVolume != nil || v.PortworxVolume != nil
}

// offered are the driver's capabilities.
func (a *Agent) offered(ctx context.Context) (types []csi.NodeServiceCapability_RPC_Type, err error) {
	caps, err := csi.NewNodeClient(a.Driver).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("the driver's capabilities: %w", err)
	}
	for _, c := range caps.GetCapabilities() {
		types = append(types, c.GetRpc().GetType())
	}
	return types, nil
}

// keptFromDriver tells whether a repeated publish must not reach the driver: a sandbox may have the volume, and the driver defers mounts no
// more (it was replaced by an older one, or was told so). It would mount what the sandbox has mounted.
func (a *Agent) keptFromDriver(ctx context.Context, d Deferral) (bool, error) {
	if d.Sandbox == "" {
		return false, nil
	}
	offered, err := a.offered(ctx)
	if err != nil {
		return false, uncertain("volume %s: %s", d.VolumeID, err)
	}
	return !slices.Contains(offered, crust.NodeCapability), nil
}

// describe sets the attributes that only the agent may set, and removes the caller's.
func (a *Agent) describe(ctx context.Context, req *csi.NodePublishVolumeRequest, d Deferral) error {
	delete(req.GetVolumeContext(), crust.ContextKernel)
	delete(req.GetVolumeContext(), crust.ContextSubPaths)
	if d.HostKernel {
		req.VolumeContext[crust.ContextKernel] = "host"
	}
	if len(d.SubPaths) > 0 {
		offered, err := a.offered(ctx)
		if err != nil {
			return uncertain("volume %s: %s", d.VolumeID, err)
		}
		text, err := d.subPaths()
		if err != nil {
			return err
		}
		// The driver may have been replaced by an older one, which refuses attributes that it does not know.
		if slices.Contains(offered, crust.SubPathCapability) {
			req.VolumeContext[crust.ContextSubPaths] = text
		}
	}
	return crust.SetSupportedFilesystems(req, d.Filesystems)
}

// everything has every capability.
var everything = func() (list []crust.Capability) {
	for n := range crustv1alpha1.RuntimeCapability_RPC_Type_name {
		list = append(list, crust.Capability(n))
	}
	return list
}()

// volumeName reads the name of the PersistentVolume from one of the kubelet's target paths; empty
// for another path.
func volumeName(target string, block bool) string {
	if block {
		return filepath.Base(filepath.Dir(target))
	}
	dir, last := filepath.Split(target)
	name := filepath.Base(dir)
	if last != "mount" || filepath.Base(filepath.Dir(filepath.Clean(dir))) != "kubernetes.io~csi" {
		return ""
	}
	return name
}

func readOnly(req *csi.NodePublishVolumeRequest) bool {
	switch req.GetVolumeCapability().GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return true
	}
	return req.GetReadonly()
}

// onlyRead returns the mount options for a pod that only reads.
func onlyRead(options map[string]string) map[string]string {
	reads := map[string]string{"ro": ""}
	maps.Copy(reads, options)
	delete(reads, "rw") // of the class; a runtime refuses both
	return reads
}
