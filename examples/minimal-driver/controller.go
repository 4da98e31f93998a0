package main

import (
	"context"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

const (
	filesystem = "ext4"
	smallest   = 16 << 20 // bytes
	topology   = "minimal.example.com/node"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	node     string
	pool     volume.Pool   // makes volumes
	kubelet  *mounter.Root // all targets lie below it
	programs *fsprogs.Programs
	busy     sync.Map // ids of volumes with a call in progress
}

// alone refuses a call for a volume while another call works on it. The packages do not serialize
// calls.
func (d *driver) alone(ctx context.Context, req any, _ *grpc.UnaryServerInfo, method grpc.UnaryHandler) (any, error) {
	var id string
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		id = volume.VolumeID(d.pool.Name(), r.GetName())
	case interface{ GetVolumeId() string }:
		id = r.GetVolumeId()
	default:
		return method(ctx, req)
	}
	if _, busy := d.busy.LoadOrStore(id, true); busy {
		return nil, fault.New(fault.Busy, "volume %s: another call is at work on it", id)
	}
	defer d.busy.Delete(id)
	return method(ctx, req)
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "minimal.example.com", VendorVersion: "1"}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, d.pool.Usable()
}

func (d *driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	resp := &csi.GetPluginCapabilitiesResponse{}
	for _, t := range []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}})
	}
	return resp, nil
}

func (d *driver) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{{
		Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{
			Type: csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}},
	}}}, nil
}

func (d *driver) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if req.GetName() == "" || req.GetVolumeContentSource() != nil {
		return nil, fault.New(fault.Invalid, "a volume needs a name, and is no copy of another one")
	}
	if _, err := supported(req.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	if on := req.GetAccessibilityRequirements().GetRequisite(); len(on) > 0 && !slices.ContainsFunc(on, d.isHere) {
		return nil, fault.New(fault.Elsewhere, "volume %s is wanted on other nodes than %s", req.GetName(), d.node)
	}
	least, most := max(req.GetCapacityRange().GetRequiredBytes(), smallest), req.GetCapacityRange().GetLimitBytes()
	fine := d.pool.Sizes().Fine
	least = (least + fine - 1) / fine * fine
	if most > 0 && most < least {
		return nil, fault.New(fault.OutOfRange, "volume %s: at least %d bytes and at most %d", req.GetName(), least, most)
	}
	v, err := d.pool.Get(volume.VolumeID(d.pool.Name(), req.GetName()))
	switch {
	case fault.Is(err, fault.NotFound):
		v, err = d.pool.Create(ctx, volume.Spec{Name: req.GetName(), Size: least, FSType: filesystem}, &volume.Progress{})
	case err == nil && (v.Size < least || most > 0 && v.Size > most):
		err = fault.New(fault.Exists, "volume %s has %d bytes; at least %d and at most %d were asked for", v.ID, v.Size, least, most)
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Size,
		AccessibleTopology: []*csi.Topology{d.here()}}}, nil
}

func (d *driver) here() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{topology: d.node}}
}

func (d *driver) isHere(t *csi.Topology) bool { return t.GetSegments()[topology] == d.node }

func (d *driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, fault.New(fault.Invalid, "volume_id is missing")
	}
	_, staged, err := d.pool.Attached(req.GetVolumeId())
	switch {
	case fault.Is(err, fault.NotFound):
		return &csi.DeleteVolumeResponse{}, nil
	case err == nil && staged:
		err = fault.New(fault.State, "volume %s is staged", req.GetVolumeId())
	default: // also one whose deletion began and did not end
		err = d.pool.Delete(ctx, req.GetVolumeId())
	}
	return &csi.DeleteVolumeResponse{}, err
}

func (d *driver) ValidateVolumeCapabilities(
	_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if req.GetVolumeId() == "" || len(req.GetVolumeCapabilities()) == 0 {
		return nil, fault.New(fault.Invalid, "volume_id or volume_capabilities are missing")
	}
	if _, err := d.pool.Get(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if _, err := supported(req.GetVolumeCapabilities()...); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeCapabilities: req.GetVolumeCapabilities()}}, nil
}

// supported returns the mount options of a capability. It refuses what a volume here cannot be: a
// raw block device, another file system, or one on several nodes at once.
func supported(capabilities ...*csi.VolumeCapability) (fs mounter.Filesystem, err error) {
	if len(capabilities) == 0 {
		return fs, fault.New(fault.Invalid, "a volume capability is missing")
	}
	fs.Type, fs.NoPanic = filesystem, true
	for _, c := range capabilities {
		if c.GetMount() == nil || c.GetMount().GetFsType() != "" && c.GetMount().GetFsType() != filesystem {
			return fs, fault.New(fault.Invalid, "volumes are mounted, with %s on them", filesystem)
		}
		if fs.Options, err = mounter.ParseOptions(c.GetMount().GetMountFlags()); err == nil {
			err = mounter.CheckOptions(filesystem, fs.Options)
		}
		if err != nil {
			return fs, err
		}
		mode := c.GetAccessMode().GetMode()
		fs.ReadOnly = fs.Options.ReadOnly() || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
		if !fs.ReadOnly && mode != csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER {
			return fs, fault.New(fault.Invalid, "access mode %s: volumes are on one node", mode)
		}
	}
	return fs, nil
}
