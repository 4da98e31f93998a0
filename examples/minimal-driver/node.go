package main

import (
	"context"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
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

// NodeStageVolume attaches the device and makes sure of its file system. It mounts nothing.
func (d *driver) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id or staging_target_path is missing")
	}
	if err := supported(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v, err := d.pool.Get(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	a, err := d.pool.Attach(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, d.format(ctx, v, a.Device)
}

// format makes a file system where there was never one. What is about to be done is on record before it is done, so that
// a crash in between is told from somebody's data.
func (d *driver) format(ctx context.Context, v volume.Volume, device mounter.Device) error {
	facts := v.Facts
	if facts.Formatted != "" {
		return nil
	}
	found, blank, err := superblock.Result{}, superblock.BlankDevice{}, error(nil)
	if facts.Formatting != nil {
		found, blank, err = superblock.Resume(device.Path, *facts.Formatting)
	} else {
		found, blank, err = volume.ProveBlank(ctx, d.pool, v.ID, device, &volume.Progress{})
	}
	switch {
	case err != nil:
		return err
	case blank.Path() != "":
		intent := blank.Intent(filesystem)
		facts.Formatting = &intent
		if err := d.pool.SetFacts(v.ID, facts); err != nil {
			return err
		}
		if err := d.programs.Format(ctx, blank, filesystem, v.Thick); err != nil {
			return err
		}
	case found.Answer != superblock.Known || found.Type != filesystem:
		return fault.New(fault.State, "volume %s: %s holds %s and was left alone", v.ID, device.Path, found)
	}
	return d.pool.SetFacts(v.ID, volume.Facts{Formatted: filesystem})
}

func (d *driver) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id or staging_target_path is missing")
	}
	return &csi.NodeUnstageVolumeResponse{}, d.pool.Detach(ctx, req.GetVolumeId())
}

// NodePublishVolume mounts the volume for one pod: first where nobody sees it, with the pod's group, and then at the target.
func (d *driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if req.GetVolumeId() == "" || req.GetTargetPath() == "" || req.GetStagingTargetPath() == "" {
		return nil, fault.New(fault.Invalid, "volume_id, target_path or staging_target_path is missing")
	}
	if err := supported(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
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
	options, err := mounter.ParseOptions(req.GetVolumeCapability().GetMount().GetMountFlags())
	if err == nil {
		err = mounter.CheckOptions(filesystem, options)
	}
	if err != nil {
		return nil, err
	}
	readOnly := req.GetReadonly() || options.ReadOnly()
	fs := mounter.Filesystem{Device: a.Device, Type: filesystem, Options: options, NoPanic: true}
	state, err := target.Look()
	if err != nil {
		return nil, err
	}
	defer state.Close()
	if state.Occupant == mounter.MountPoint {
		fs.ReadOnly = readOnly
		difference, err := state.Differs(fs)
		if err == nil && difference != "" {
			err = fault.New(fault.Exists, "volume %s: %s", req.GetVolumeId(), difference)
		}
		return &csi.NodePublishVolumeResponse{}, err
	}
	return &csi.NodePublishVolumeResponse{}, d.mount(ctx, fs, readOnly, req.GetVolumeCapability().GetMount().GetVolumeMountGroup(), target)
}

func (d *driver) mount(ctx context.Context, fs mounter.Filesystem, readOnly bool, group string, target *mounter.Target) error {
	m, err := mounter.Open(fs)
	if err != nil {
		return err
	}
	defer m.Close()
	if group != "" {
		gid, err := strconv.ParseUint(group, 10, 32)
		if err != nil {
			return fault.New(fault.Invalid, "volume_mount_group %q is no group id", group)
		}
		top, err := m.Dir()
		if err != nil {
			return err
		}
		defer top.Close()
		inodes := ownership.InodesOf(fs.Type, fs.Device.Path)
		if _, err := ownership.Apply(ctx, top, uint32(gid), ownership.OnRootMismatch, inodes, &ownership.Progress{}); err != nil {
			return err
		}
	}
	if err := m.Change(mounter.View{Options: fs.Options, ReadOnly: readOnly}); err != nil {
		return err
	}
	dir, err := target.Prepare(true)
	if err != nil {
		return err
	}
	defer dir.Close()
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
	return &csi.NodeUnpublishVolumeResponse{}, d.unmount(req.GetVolumeId(), target)
}

// unmount takes this volume off the target, and nothing else that may be there.
func (d *driver) unmount(id string, target *mounter.Target) error {
	mounted, err := d.shows(id, target)
	if err == nil && mounted {
		err = target.Unmount()
	}
	if err != nil {
		return err
	}
	return target.Remove()
}

// shows tells whether the volume is mounted at the target. Another mount there is an error.
func (d *driver) shows(id string, target *mounter.Target) (bool, error) {
	state, err := target.Look()
	if err != nil {
		return false, err
	}
	defer state.Close()
	if state.Occupant != mounter.MountPoint {
		return false, nil
	}
	shown, ok, err := state.Device()
	if err != nil {
		return false, err
	}
	if a, staged, err := d.pool.Attached(id); err != nil || !ok || !staged || !a.Device.Same(shown) {
		return false, fault.New(fault.State, "what is mounted at %s is not volume %s; it was left alone", target.Path, id)
	}
	return true, nil
}
