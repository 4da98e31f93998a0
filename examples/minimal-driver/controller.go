package main

import (
	"context"
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
	mu       sync.Mutex
}

// oneAtATime serialises all calls. What changes one volume must not run at once; a lock for each volume would do.
func (d *driver) oneAtATime(ctx context.Context, req any, _ *grpc.UnaryServerInfo, method grpc.UnaryHandler) (any, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
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
	if err := supported(req.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	least, most := max(req.GetCapacityRange().GetRequiredBytes(), smallest), req.GetCapacityRange().GetLimitBytes()
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

func (d *driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, fault.New(fault.Invalid, "volume_id is missing")
	}
	err := d.pool.Delete(ctx, req.GetVolumeId())
	if fault.Is(err, fault.NotFound) {
		err = nil
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
	if err := supported(req.GetVolumeCapabilities()...); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeCapabilities: req.GetVolumeCapabilities()}}, nil
}

// supported refuses what a volume here cannot be: a raw block device, another file system, or on several nodes at once.
func supported(capabilities ...*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return fault.New(fault.Invalid, "a volume capability is missing")
	}
	for _, c := range capabilities {
		if c.GetMount() == nil || c.GetMount().GetFsType() != "" && c.GetMount().GetFsType() != filesystem {
			return fault.New(fault.Invalid, "volumes are mounted, with %s on them", filesystem)
		}
		switch c.GetAccessMode().GetMode() {
		case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		default:
			return fault.New(fault.Invalid, "access mode %s: volumes are on one node", c.GetAccessMode().GetMode())
		}
		if _, err := mounter.ParseOptions(c.GetMount().GetMountFlags()); err != nil {
			return err
		}
	}
	return nil
}
