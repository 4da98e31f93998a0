package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node, AccessibleTopology: d.here()}, nil
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return resp, nil
}

// NodeStageVolume attaches the device, and formats it the first time. It mounts nothing.
func (d *driver) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id or staging_target_path is missing")
	}
	if _, err := supported(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	a, err := d.pool.Attach(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	// mkfs outlives its caller.
	long := context.WithoutCancel(ctx)
	err = volume.EnsureFilesystem(long, d.pool, req.GetVolumeId(), a.Device, filesystem, d.programs, nil)
	if err != nil { // it counts as staged while it is attached, and nobody may come to unstage it
		err = errors.Join(err, d.pool.Detach(long, req.GetVolumeId()))
	}
	return &csi.NodeStageVolumeResponse{}, err
}

func (d *driver) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id or staging_target_path is missing")
	}
	err := d.pool.Detach(ctx, req.GetVolumeId())
	if fault.Is(err, fault.NotFound) {
		err = nil
	}
	return &csi.NodeUnstageVolumeResponse{}, err
}

// NodePublishVolume mounts the volume for one pod: first in private, to apply the pod's group, and
// then at the target.
func (d *driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetTargetPath() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id, target_path or staging_target_path is missing")
	}
	fs, err := supported(req.GetVolumeCapability())
	if err != nil {
		return nil, err
	}
	fs.ReadOnly = fs.ReadOnly || req.GetReadonly()
	target, err := d.kubelet.Target(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	defer target.Close()
	if _, err := d.pool.Get(req.GetVolumeId()); err != nil {
		return nil, err
	}
	a, staged, err := d.pool.Attached(req.GetVolumeId())
	if err == nil && !staged {
		err = fault.New(fault.State, "volume %s is not staged", req.GetVolumeId())
	}
	if err != nil {
		return nil, err
	}
	fs.Device = a.Device
	state, err := target.Look()
	if err != nil {
		return nil, err
	}
	defer state.Close()
	if state.Occupant == mounter.MountPoint { // a repeated call
		difference, err := state.Differs(fs)
		if err == nil && difference != "" {
			err = fault.New(fault.Exists, "volume %s: %s", req.GetVolumeId(), difference)
		}
		return &csi.NodePublishVolumeResponse{}, err
	}
	group := req.GetVolumeCapability().GetMount().GetVolumeMountGroup()
	return &csi.NodePublishVolumeResponse{}, mount(context.WithoutCancel(ctx), fs, group, target) // a walk outlives its caller
}

func mount(ctx context.Context, fs mounter.Filesystem, group string, target *mounter.Target) error {
	used, err := mounter.Busy(fs.Device.Path)
	if err != nil {
		return err
	}
	m, err := mounter.Open(fs)
	if err != nil {
		return err
	}
	defer m.Close()
	if group != "" && !fs.ReadOnly { // a read-only user must not take files from a writer
		gid, err := ownership.ParseGroup(group)
		if err != nil {
			return err
		}
		top, err := m.Dir()
		if err != nil {
			return err
		}
		defer top.Close()
		var inodes ownership.Inodes
		if !used { // nobody changes them meanwhile
			inodes = ownership.InodesOf(fs.Device.Path, fs.Type)
		}
		if _, err := ownership.Apply(ctx, top, gid, ownership.OnRootMismatch, inodes, nil); err != nil {
			return err
		}
	}
	return m.Attach(target)
}

func (d *driver) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id or target_path is missing")
	}
	target, err := d.kubelet.Target(req.GetTargetPath())
	if fault.Is(err, fault.NotFound) {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer target.Close()
	a, _, err := d.pool.Attached(req.GetVolumeId())
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, target.Clear(a.Device) // this volume's mount, and no other
}
