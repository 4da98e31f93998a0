package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func wrapInt64(n int64) *wrapperspb.Int64Value { return wrapperspb.Int64(n) }

// ControllerExpandVolume enlarges a volume, in use or not.
func (d *Driver) ControllerExpandVolume(
	ctx context.Context, req *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := required("volume_id", id); err != nil {
		return nil, err
	}
	if req.GetCapacityRange() == nil || req.GetCapacityRange().GetRequiredBytes() == 0 && req.GetCapacityRange().GetLimitBytes() == 0 {
		return nil, invalid("capacity_range is missing")
	}
	pool, ok := d.Volumes.OwnerOf(id)
	if !ok {
		_, err := d.found(ctx, id)
		if err == nil {
			err = fault.New(fault.State, "volume %s is static; enlarge its device, then call NodeExpandVolume", id)
		}
		return nil, err
	}
	var v volume.Volume
	err := d.inPool(ctx, "ControllerExpandVolume", pool, func(ctx context.Context, _ *volume.Progress) error {
		var err error
		if v, err = pool.Get(id); err != nil {
			return err
		}
		v, err = d.enlarge(ctx, pool, v, req.GetCapacityRange())
		return err
	}, id)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Size, NodeExpansionRequired: !v.Block}, nil
}

// enlarge grows a pool's volume to the requested size, and its device if attached. A limit below
// the present size is OUT_OF_RANGE.
func (d *Driver) enlarge(ctx context.Context, pool volume.Pool, v volume.Volume, r *csi.CapacityRange) (volume.Volume, error) {
	if err := checkRange(r); err != nil {
		return v, err
	}
	if limit := r.GetLimitBytes(); limit > 0 && limit < v.Size {
		return v, fault.New(fault.OutOfRange, "volume %s has %d bytes, more than the limit of %d: volumes do not shrink",
			v.ID, v.Size, limit)
	}
	if r.GetRequiredBytes() <= v.Size {
		d.refused.note(v.ID, nil) // the request is for less now
		// It has that size already; its device may not.
		return pool.Expand(ctx, v.ID, v.Size)
	}
	if err := neverGrows(v.Block, v.FSType); err != nil {
		return v, fmt.Errorf("volume %s keeps its %d bytes: %w", v.ID, v.Size, err)
	}
	size, err := chooseSize(r, pool.Sizes(), v.Size, 0)
	if err != nil {
		return v, err
	}
	grown, err := pool.Expand(ctx, v.ID, size)
	d.refused.note(v.ID, err)
	d.audit(ctx, audit.Event{Action: audit.Grown, Volume: v.ID, Bytes: size}, err)
	return grown, err
}

// neverGrows returns a fault.OutOfRange for a volume whose file system never grows. Its device must not, either.
func neverGrows(block bool, fsType string) error {
	if block {
		return nil
	}
	if err := mounter.NeverGrows(fsType); err != nil {
		return fault.New(fault.OutOfRange, "%w", err)
	}
	return nil
}

// enlargeHere enlarges a volume that is used on this node, if nodes do that here. A static volume
// keeps its device's size; only that size is read again.
//
// A pool that lacks the room is FAILED_PRECONDITION, and so is a file system that never grows: the only code after which a kubelet that is
// about to mount the volume goes on (Kubernetes 1.36, node_expander.go). So a request for too much
// keeps no pod from starting.
func (d *Driver) enlargeHere(ctx context.Context, src volume.Source, id string, r *csi.CapacityRange) error {
	pool, ok := d.Volumes.OwnerOf(id)
	if !ok || !d.NodesExpand {
		return src.Refresh(ctx, id)
	}
	v, err := pool.Get(id)
	if err != nil {
		return err
	}
	_, err = d.enlarge(ctx, pool, v, r)
	switch {
	case fault.Is(err, fault.NoSpace):
		return fault.New(fault.State, "%w; the volume keeps its size until it is mounted anew", err)
	case err != nil && neverGrows(v.Block, v.FSType) != nil:
		return fault.New(fault.State, "%w", err)
	}
	return err
}

func (d *Driver) findSnapshot(ctx context.Context, id string) (volume.Snapshot, error) {
	pool, ok := d.Volumes.OwnerOf(id)
	if !ok {
		return volume.Snapshot{}, fault.New(fault.NotFound, "snapshot %s does not exist on this node", id)
	}
	return askPool(ctx, d, pool, func() (volume.Snapshot, error) { return pool.GetSnapshot(id) })
}

func describeSnapshot(s volume.Snapshot) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: s.ID, SourceVolumeId: s.Volume, SizeBytes: s.Size,
		CreationTime: timestamppb.New(s.Created), ReadyToUse: true,
	}
}

// CreateSnapshot copies a volume as it is now. It freezes a mounted file system meanwhile.
func (d *Driver) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	id := req.GetSourceVolumeId()
	if err := required("source_volume_id", id); err != nil {
		return nil, err
	}
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	for _, key := range sortedKeys(req.GetParameters()) {
		if len(key) < len(orchestratorPrefix) || key[:len(orchestratorPrefix)] != orchestratorPrefix {
			return nil, invalid("parameter %q is unknown; a VolumeSnapshotClass of this driver has none", key)
		}
	}
	keys := []string{"snapshot name " + req.GetName(), id}
	var s volume.Snapshot
	take := func(ctx context.Context, p *volume.Progress) error {
		var err error
		s, err = d.snapshot(ctx, req.GetName(), id, p)
		return err
	}
	var err error
	if pool, ok := d.Volumes.OwnerOf(id); ok {
		err = d.inPool(ctx, "CreateSnapshot", pool, take, append(keys, volume.SnapshotID(pool.Name(), req.GetName()))...)
	} else {
		err = d.ops.long(ctx, "CreateSnapshot", take, keys...)
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: describeSnapshot(s)}, nil
}

func (d *Driver) snapshot(ctx context.Context, name, id string, p *volume.Progress) (volume.Snapshot, error) {
	owner, _ := d.Volumes.OwnerOf(id)
	for _, pool := range d.Volumes.Pools() {
		have, err := askPool(ctx, d, pool, func() (volume.Snapshot, error) {
			return pool.GetSnapshot(volume.SnapshotID(pool.Name(), name))
		})
		if fault.Is(err, fault.NotFound) || pool != owner && fault.Is(err, fault.Unavailable) {
			continue // another pool that does not answer has no such volume either
		}
		if err == nil && have.Volume != id {
			err = fault.New(fault.Exists, "snapshot %q exists as %s, of volume %s; it was asked for of %s", name, have.ID, have.Volume, id)
		}
		return have, err
	}
	pool, ok := d.Volumes.OwnerOf(id)
	if !ok {
		_, _, err := d.Volumes.Find(id)
		if err == nil {
			err = fault.New(fault.State, "volume %s is static; the driver takes snapshots of pools' volumes only", id)
		}
		return volume.Snapshot{}, err
	}
	s, err := pool.CreateSnapshot(ctx, volume.SnapshotSpec{Name: name, Volume: id, Quiesce: d.quiesce(pool, id)}, p)
	if err == nil {
		d.audit(ctx, audit.Event{Action: audit.SnapshotMade, Volume: id, Snapshot: s.ID, Name: name, Bytes: s.Size}, nil)
	}
	return s, err
}

// DeleteSnapshot destroys a snapshot.
func (d *Driver) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	id := req.GetSnapshotId()
	if err := required("snapshot_id", id); err != nil {
		return nil, err
	}
	if err := d.isHere(ctx, id); err != nil {
		return nil, err
	}
	if pool, ok := d.Volumes.OwnerOf(id); ok {
		err := d.inPool(ctx, "DeleteSnapshot", pool, func(ctx context.Context, _ *volume.Progress) error {
			s, err := pool.GetSnapshot(id)
			if fault.Is(err, fault.NotFound) {
				return pool.DeleteSnapshot(ctx, id)
			}
			deleted := audit.Event{Action: audit.SnapshotDeleted, Snapshot: id, Volume: s.Volume}
			return d.irreversible(ctx, deleted, func() error { return pool.DeleteSnapshot(ctx, id) })
		}, id)
		if err != nil {
			return nil, err
		}
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// GetSnapshot returns one snapshot.
func (d *Driver) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if err := required("snapshot_id", req.GetSnapshotId()); err != nil {
		return nil, err
	}
	s, err := d.findSnapshot(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: describeSnapshot(s)}, nil
}

// ListSnapshots lists the snapshots of all pools, of one volume, or one.
func (d *Driver) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	var all []volume.Snapshot
	for _, pool := range d.Volumes.Pools() {
		for _, s := range pool.ListSnapshots() {
			if (req.GetSnapshotId() == "" || s.ID == req.GetSnapshotId()) &&
				(req.GetSourceVolumeId() == "" || s.Volume == req.GetSourceVolumeId()) {
				all = append(all, s)
			}
		}
	}
	sortBy(all, func(s volume.Snapshot) string { return s.ID })
	list, next, err := page(all, func(s volume.Snapshot) string { return s.ID }, req.GetStartingToken(), req.GetMaxEntries(), true)
	if err != nil {
		return nil, err
	}
	resp := &csi.ListSnapshotsResponse{NextToken: next}
	for _, s := range list {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: describeSnapshot(s)})
	}
	return resp, nil
}
