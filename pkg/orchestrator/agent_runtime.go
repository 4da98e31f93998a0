package orchestrator

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func (a *Agent) nodeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest, request []byte, next Call) ([]byte, error) {
	if err := a.Records.Unusable(req.GetVolumePath()); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	d, ok := a.Records.Get(req.GetVolumePath())
	if !ok {
		return next(ctx, request)
	}
	can, _, err := a.supports(ctx, d)
	if err != nil {
		return nil, err
	}
	if err := crust.SetSupportsStats(req, slices.Contains(can, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS)); err != nil {
		return nil, err
	}
	answer, raw, err := forward[csi.NodeGetVolumeStatsResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	source, err := crust.StatsSource(answer)
	if err != nil || source == "" {
		return raw, err
	}
	c, err := a.inSandbox(d)
	if err != nil {
		return nil, err
	}
	// By the name that it was published with: the driver may have another one by now.
	r, err := c.RuntimeGetVolumeStats(ctx, &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: d.Sandbox, HostVolumeId: d.Source})
	if err != nil {
		return nil, ofRuntime(d, err)
	}
	answer.Usage = nil
	for _, u := range r.GetUsage() {
		answer.Usage = append(answer.Usage, &csi.VolumeUsage{
			Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: csi.VolumeUsage_Unit(u.GetUnit()),
		})
	}
	if r.GetVolumeCondition().GetAbnormal() {
		a.tell(d.Pod, corev1.EventTypeWarning, EventNotWell, fmt.Sprintf("volume %s in the pod's sandbox: %s", d.Volume,
			r.GetVolumeCondition().GetMessage()), "")
	}
	return proto.Marshal(answer)
}

func (a *Agent) nodeExpand(ctx context.Context, req *csi.NodeExpandVolumeRequest, request []byte, next Call) ([]byte, error) {
	if err := a.Records.Unusable(req.GetVolumePath()); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	d, ok := a.Records.Get(req.GetVolumePath())
	if !ok {
		return next(ctx, request)
	}
	can, supported, err := a.supports(ctx, d)
	if err != nil {
		return nil, err
	}
	if err := crust.SetSupportsExpand(req, crust.Grows(can, supported, d.Type)); err != nil {
		return nil, err
	}
	answer, raw, err := forward[csi.NodeExpandVolumeResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	source, err := crust.ExpandSource(answer)
	if err != nil || source == "" {
		return raw, err
	}
	// A kubelet that mounts an enlarged volume grows it before the pod has a sandbox, or another
	// one, and starts none until that succeeds. A later mount in the sandbox fills the device.
	if now, ok := a.Records.Get(d.Target); ok && !now.Published && !a.publishing(d.Target) {
		return raw, nil
	}
	c, err := a.inSandbox(d)
	if err != nil {
		return nil, err
	}
	r, err := c.RuntimeExpandVolume(ctx, &crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: d.Sandbox, HostVolumeId: d.Source,
		RequiredBytes: req.GetCapacityRange().GetRequiredBytes()})
	if status.Code(err) == codes.NotFound { // that sandbox has ended
		if now, ok := a.Records.Get(d.Target); ok && now.Sandbox != d.Sandbox {
			return nil, uncertain("volume %s: the pod got another sandbox meanwhile; try again", d.VolumeID)
		}
		return raw, nil
	}
	if status.Code(err) == codes.Unavailable {
		// A kubelet that waits for the growth starts no container, and so ends no pending.
		if pending, perr := a.runtimes.publish(ctx, d, d.Sandbox); perr == nil && pending {
			return raw, nil
		}
	}
	if err != nil {
		return nil, ofRuntime(d, err)
	}
	answer.CapacityBytes = r.GetCapacityBytes()
	return proto.Marshal(answer)
}

// supports asks what a volume's runtime can do.
func (a *Agent) supports(ctx context.Context, d Deferral) (
	list []crust.Capability, filesystems *crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, err error,
) {
	if list, filesystems, err = a.runtimes.supports(ctx, d.Socket); err != nil {
		err = status.Errorf(codes.Unavailable, "volume %s: the runtime at %s: %s", d.VolumeID, d.Socket, err)
	}
	return list, filesystems, err
}

// inSandbox returns the runtime that has a volume mounted.
func (a *Agent) inSandbox(d Deferral) (*crust.Client, error) {
	if !d.Published {
		return nil, status.Errorf(codes.Unavailable, "volume %s is not mounted in the pod's sandbox yet", d.VolumeID)
	}
	return a.runtimes.client(d.Socket)
}

// ofRuntime maps a runtime's error on an advertised capability. The error of a sandbox that is
// starting or ending must not be final for the kubelet, which would not try again.
func ofRuntime(d Deferral, err error) error {
	code := codes.Unavailable
	if status.Code(err) == codes.Unimplemented {
		code = codes.Unimplemented
	}
	return status.Errorf(code, "volume %s in the sandbox of pod %s/%s: %s", d.VolumeID, d.Pod.Namespace, d.Pod.Name,
		plain.Text(status.Convert(err).Message(), plain.Most))
}
