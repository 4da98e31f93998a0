package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// ValidateVolumeCapabilities tells whether a volume supports all the given capabilities.
func (d *Driver) ValidateVolumeCapabilities(
	ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, invalid("volume_capabilities are missing")
	}
	find := func() (volume.Volume, error) {
		_, v, err := d.Volumes.FindOrAdopt(req.GetVolumeId(), req.GetVolumeContext())
		return v, err
	}
	var v volume.Volume
	var err error
	if p, ok := d.Volumes.OwnerOf(req.GetVolumeId()); ok {
		v, err = askPool(ctx, d, p, find)
	} else {
		// It may write the record of a static volume, as a stage does.
		err = d.ops.short("ValidateVolumeCapabilities", func() (err error) { v, err = find(); return err }, req.GetVolumeId())
	}
	if err != nil {
		return nil, err
	}
	u, err := parseUses(req.GetVolumeCapabilities(), v.Share)
	if _, made := d.Volumes.OwnerOf(v.ID); made {
		if err == nil && u.block != v.Block {
			err = invalid("the volume is %s", kindOf(v.Block, v.FSType))
		}
		if err == nil && u.fstype != "" && u.fstype != v.FSType {
			err = invalid("the volume has file system %s, not %s", v.FSType, u.fstype)
		}
	} else if has := v.Facts.Formatted; err == nil && has != "" && u.fstype != "" && u.fstype != has {
		err = invalid("the volume has file system %s, not %s", has, u.fstype)
	}
	if err == nil {
		_, err = ParseParameters(req.GetParameters())
	}
	if err == nil {
		_, err = parseAttributes(req.GetVolumeContext(), d.Volumes.Static())
	}
	if err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: req.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(), Parameters: req.GetParameters(),
	}}, nil
}
