package driver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	plaintext "github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// at opens the target where a volume is published, or returns NOT_FOUND.
func (d *Driver) at(src volume.Source, id, path string) (*mounter.State, error) {
	t, s, err := d.look(path)
	if err != nil {
		if fault.Is(err, fault.Invalid) {
			err = fault.New(fault.NotFound, "volume %s is not at %q: %w", id, path, err)
		}
		return nil, err
	}
	defer t.Close()
	ours, _, err := d.shows(s, src, id, path)
	if err == nil && !ours {
		err = fault.New(fault.NotFound, "volume %s is not published at %s", id, path)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// NodeGetVolumeStats returns a volume's usage. It takes no lock: no operation on a volume delays it
// except an unmount.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := required("volume_id", id, "volume_path", path); err != nil {
		return nil, err
	}
	var stats *csi.NodeGetVolumeStatsResponse
	err := d.readers.look(ctx, ofVolume(id), func() error {
		src, v, err := d.Volumes.Find(id) // it reads the pool's disk, which may hang
		if err != nil {
			// NotFound tells crust-agent that the deferral ended.
			if _, deferred := d.deferrals.at(id, path); deferred && fault.Is(err, fault.NotFound) {
				return fault.New(fault.Unavailable, "volume %s is left to the runtime of the pod at %s, and its pool is not here: %w",
					id, path, err)
			}
			return err
		}
		stats, err = d.stats(ctx, src, v, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return stats, nil
}

func (d *Driver) stats(
	ctx context.Context, src volume.Source, v volume.Volume, req *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	staged, isStaged := d.staged.get(id)
	if r, deferred, err := d.deferredAt(id, path); err != nil {
		return nil, err
	} else if deferred {
		return deferredStats(r, req)
	}
	if isStaged && staged.StagingPath == path {
		return d.stagedStats(ctx, src, staged)
	}
	s, err := d.at(src, id, path)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if s.IsBlock() {
		return d.blockStats(ctx, src, v)
	}
	usage, err := s.Usage()
	if err != nil {
		return nil, err
	}
	return describeUsage(usage), nil
}

// stagedStats answers for a volume that is staged and perhaps mounted nowhere.
func (d *Driver) stagedStats(ctx context.Context, src volume.Source, r stagedRecord) (*csi.NodeGetVolumeStatsResponse, error) {
	a, ok, err := src.Attached(r.VolumeID)
	if err == nil && (!ok || a.Share != nil) {
		err = fault.New(fault.NotFound, "volume %s is not mounted; ask for a path where it is published", r.VolumeID)
	}
	if err != nil {
		return nil, err
	}
	if r.Block {
		v, err := src.Get(r.VolumeID)
		if err != nil {
			return nil, err
		}
		return d.blockStats(ctx, src, v)
	}
	if err := d.withheldHere(src, r.VolumeID, "mounted"); err != nil {
		return nil, err
	}
	fs, err := d.live(a.Device, r.VolumeID, r.FSType)
	if err != nil {
		return nil, err
	}
	fs.ReadOnly = true
	m, err := mounter.Open(fs)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	usage, err := m.Usage()
	if err != nil {
		return nil, err
	}
	return describeUsage(usage), nil
}

// blockStats answers for a raw block volume. Its size is that of its device, which a pod may have changed.
func (d *Driver) blockStats(ctx context.Context, src volume.Source, v volume.Volume) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := src.RestoreDevices(ctx, v.ID); err != nil {
		return nil, err
	}
	size := v.Size
	a, ok, err := src.Attached(v.ID)
	if err == nil && ok {
		size, err = mounter.DeviceSize(a.Device)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: size}}}, nil
}

func describeUsage(u mounter.Usage) *csi.NodeGetVolumeStatsResponse {
	resp := &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: u.TotalBytes, Available: u.AvailableBytes, Used: u.UsedBytes},
	}}
	if u.TotalInodes > 0 {
		resp.Usage = append(resp.Usage, &csi.VolumeUsage{
			Unit: csi.VolumeUsage_INODES, Total: u.TotalInodes, Available: u.AvailableInodes, Used: u.UsedInodes,
		})
	}
	return resp
}

// NodeGetVolumeHealth reports what is wrong with a volume, as seen from here.
func (d *Driver) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	id := req.GetVolumeId()
	if err := required("volume_id", id); err != nil {
		return nil, err
	}
	var health *csi.NodeGetVolumeHealthResponse
	err := d.readers.look(ctx, ofVolume(id), func() error {
		src, _, err := d.Volumes.Find(id)
		if err != nil {
			return err
		}
		health = d.health(ctx, src, id, req.GetVolumePublishPath(), true)
		return nil
	})
	switch {
	case err == nil:
		return health, nil
	case errors.Is(err, errNoAnswer):
		return describeHealth(id, append(d.lost.of(id), mounter.Ailment{Reason: doesNotReply, Message: err.Error(), Fatal: true})), nil
	case fault.Is(err, fault.NotFound) && d.orphan(id) != nil:
		return describeHealth(id, append(d.lost.of(id), d.orphan(id)...)), nil
	case errors.Is(err, errWriting):
		return describeHealth(id, append(d.lost.of(id),
			mounter.Ailment{Reason: "BeingWrittenOut", Message: err.Error(), Informational: true})), nil
	case errors.Is(err, errTakenAway):
		return describeHealth(id, append(d.lost.of(id),
			mounter.Ailment{Reason: "BeingTakenAway", Message: err.Error(), Informational: true})), nil
	}
	if _, staged := d.staged.get(id); staged && fault.Is(err, fault.Unavailable) {
		return describeHealth(id, append(d.lost.of(id), mounter.Ailment{Reason: "PoolIsAway", Message: err.Error(), Fatal: true})), nil
	}
	if lost := d.lost.of(id); len(lost) > 0 {
		return describeHealth(id, lost), nil
	}
	return nil, err
}

// health looks at a volume. On a crowded pool only a flush finds lost writes. Frequent callers omit
// it, and get the losses that somebody else found.
func (d *Driver) health(ctx context.Context, src volume.Source, id, path string, flush bool) *csi.NodeGetVolumeHealthResponse {
	var ailments []mounter.Ailment
	if r, ok := d.staged.get(id); ok && r.Block {
		if err := src.RestoreDevices(ctx, id); err != nil {
			ailments = append(ailments, mounter.Ailment{Reason: "DeviceChanged", Message: err.Error(), Fatal: true})
		}
	}
	ailments = append(ailments, src.Health(id)...)
	if all := d.deferrals.of(id); len(all) > 0 {
		ailments = append(ailments, mounter.Ailment{Reason: "DeferredToRuntime", Informational: true,
			Message: "the runtime of the pod at " + targetsOf(all) +
				" has mounted the volume or will; ask it for the health of its file system"})
	}
	if _, ok := d.staged.get(id); ok {
		ailments = append(ailments, d.stagedAilments(ctx, src, id, path, flush && crowded(ailments))...)
	}
	return describeHealth(id, append(ailments, d.lost.of(id)...))
}

func describeHealth(id string, ailments []mounter.Ailment) *csi.NodeGetVolumeHealthResponse {
	health := &csi.VolumeHealth{VolumeId: id}
	seen := map[string]bool{}
	for _, a := range ailments {
		if seen[a.Reason] {
			continue
		}
		seen[a.Reason] = true
		status := csi.VolumeHealthErrorType_DEGRADED
		switch {
		case a.Lost:
			status = csi.VolumeHealthErrorType_DATA_LOSS
		case a.Fatal:
			status = csi.VolumeHealthErrorType_INACCESSIBLE
		case a.Informational:
			status = csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE
		}
		health.HealthStatuses = append(health.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: status, Reason: a.Reason, Message: plaintext.Text(a.Message, mostHealth),
		})
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}
}

func (d *Driver) stagedAilments(ctx context.Context, src volume.Source, id, path string, crowded bool) []mounter.Ailment {
	a, ok, err := src.Attached(id)
	switch {
	case err != nil:
		return []mounter.Ailment{{Reason: "DeviceGone", Message: err.Error(), Fatal: true}}
	case !ok:
		return []mounter.Ailment{{Reason: "DeviceGone", Message: "the volume is staged, but its device was detached", Fatal: true}}
	case a.Share != nil:
		return nil
	}
	found := mounter.DeviceHealth(a.Device)
	d.identify(src, id)
	paths := d.published.of(id)
	if path != "" {
		paths = []string{path}
	}
	for _, p := range paths {
		s, err := d.at(src, id, p)
		if err != nil {
			if _, deferred := d.deferrals.at(id, p); path != "" && !deferred {
				found = append(found, mounter.Ailment{Reason: "NotPublished", Message: err.Error(), Fatal: true})
			}
			continue
		}
		if d.published.shown(id, p).ReadOnly == notRecursive {
			found = append(found, mounter.Ailment{Reason: "ReadOnlyNotRecursive", Informational: true,
				Message: p + " is read-only, but mounts below it would not be: this kernel has no mount_setattr (Linux 5.12)"})
		}
		if !s.IsBlock() {
			found = append(found, s.Ailments(a.Device)...)
		}
		if crowded {
			written := s.WritesLost
			if s.IsBlock() {
				written = func() error { return mounter.Flush(a.Device) }
			}
			done := d.readers.writing(ofVolume(id))
			d.noteLost(ctx, id, written())
			done()
		}
		s.Close()
		break // the others show the same file system
	}
	return found
}
