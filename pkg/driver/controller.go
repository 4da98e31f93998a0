package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

const maxNameLength = 128

// ControllerGetCapabilities returns the controller service's capabilities.
func (d *Driver) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range d.controllerCapabilities() {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

func (d *Driver) controllerCapabilities() []csi.ControllerServiceCapability_RPC_Type {
	all := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if !d.NodesExpand {
		all = append(all, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME)
	}
	return all
}

// CreateVolume creates a volume in a pool of this node.
func (d *Driver) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, pool, err := d.wanted(ctx, req)
	if err != nil {
		return nil, err
	}
	keys := []string{"volume name " + want.Name, volume.VolumeID(pool.Name(), want.Name)}
	for _, source := range []string{want.SourceVolume, want.SourceSnapshot} {
		if source != "" {
			keys = append(keys, source)
		}
	}
	var made volume.Volume
	err = d.inPool(ctx, "CreateVolume", pool, func(ctx context.Context, p *volume.Progress) error {
		var err error
		made, err = d.create(ctx, req, want, pool, p)
		return err
	}, keys...)
	if err != nil {
		return nil, err
	}
	v := d.describe(made)
	v.VolumeContext = volumeContext(made.Parameters)
	if made.Parameters == nil { // made before they were kept
		v.VolumeContext = volumeContext(req.GetParameters())
	}
	return &csi.CreateVolumeResponse{Volume: v}, nil
}

func (d *Driver) create(
	ctx context.Context, req *csi.CreateVolumeRequest, want volume.Spec, pool volume.Pool, p *volume.Progress,
) (volume.Volume, error) {
	for _, other := range d.Volumes.Pools() {
		have, err := askPool(ctx, d, other, func() (volume.Volume, error) { return other.Get(volume.VolumeID(other.Name(), want.Name)) })
		if fault.Is(err, fault.NotFound) || other != pool && fault.Is(err, fault.Unavailable) {
			continue
		}
		if err != nil {
			return volume.Volume{}, err
		}
		return have, sameVolume(have, want, other == pool, req.GetCapacityRange())
	}
	if err := d.knows(want, req.GetParameters()[crust.AllowParameter] == "true"); err != nil {
		return volume.Volume{}, err
	}
	if want.SourceVolume != "" {
		want.Quiesce = d.quiesce(pool, want.SourceVolume)
	}
	made, err := pool.Create(ctx, want, p)
	if err == nil {
		d.audit(ctx, createdEvent(made, req.GetParameters()), nil)
	}
	return made, err
}

// sameVolume returns an error unless an existing volume matches a repeated call.
func sameVolume(have volume.Volume, want volume.Spec, samePool bool, r *csi.CapacityRange) error {
	differs := ""
	switch {
	case !samePool:
		differs = "it is in another pool"
	case have.Size < r.GetRequiredBytes() || r.GetLimitBytes() > 0 && have.Size > r.GetLimitBytes():
		differs = fmt.Sprintf("it has %d bytes", have.Size)
	case have.Thick != want.Thick:
		differs = "its provisioning differs"
	case have.Block != want.Block:
		differs = "one is for block access, the other for a file system"
	case have.FSType != want.FSType:
		differs = fmt.Sprintf("its file system is %q", have.FSType)
	case have.SourceSnapshot != want.SourceSnapshot || have.SourceVolume != want.SourceVolume:
		differs = "it was made from another source"
	default:
		differs = otherParameter(have.Parameters, want.Parameters)
	}
	if differs == "" {
		return nil
	}
	return fault.New(fault.Exists, "volume %q exists as %s and is not what was asked for: %s", want.Name, have.ID, differs)
}

// wanted parses a create request.
func (d *Driver) wanted(ctx context.Context, req *csi.CreateVolumeRequest) (volume.Spec, volume.Pool, error) {
	var spec volume.Spec
	if err := checkName(req.GetName()); err != nil {
		return spec, nil, err
	}
	u, err := parseUses(req.GetVolumeCapabilities(), false)
	if err != nil {
		return spec, nil, err
	}
	fsType, err := u.creatable()
	if err != nil {
		return spec, nil, err
	}
	params, err := ParseParameters(req.GetParameters())
	if err != nil {
		return spec, nil, err
	}
	if len(req.GetMutableParameters()) > 0 {
		return spec, nil, invalid("mutable parameter %q: this driver has none (no MODIFY_VOLUME)",
			sortedKeys(req.GetMutableParameters())[0])
	}
	if err := d.checkTopology(req.GetAccessibilityRequirements()); err != nil {
		return spec, nil, err
	}
	spec = volume.Spec{Name: req.GetName(), Thick: params.Thick, Block: u.block, FSType: fsType,
		Parameters: ownParameters(req.GetParameters())}
	if u.fstype == "" && req.GetVolumeContentSource() != nil {
		spec.FSType = "" // a copy has that of its origin
	}
	smallest, err := d.source(ctx, req.GetVolumeContentSource(), &spec, &params.Pool)
	if fault.Is(err, fault.NotFound) && len(req.GetAccessibilityRequirements().GetRequisite()) > 0 {
		// RESOURCE_EXHAUSTED is the only code that makes external-provisioner try another node.
		err = fault.New(fault.Elsewhere, "a copy is made on the node that has its origin, and %s has not: %w", d.NodeID, err)
	}
	if err != nil {
		return spec, nil, err
	}
	pool, err := d.Volumes.Pool(params.Pool)
	if err != nil {
		return spec, nil, err
	}
	spec.Size, err = chooseSize(req.GetCapacityRange(), pool.Sizes(), smallest, fstype.Of(spec.FSType).Minimum)
	if err == nil && smallest > 0 && spec.Size > smallest {
		if err = neverGrows(spec.Block, spec.FSType); err != nil {
			err = fmt.Errorf("a copy of %d bytes was asked for, and its origin has %d: %w", spec.Size, smallest, err)
		}
	}
	return spec, pool, err
}

// knows refuses a new volume that nothing on this node can mount. A copy is where its origin is, and has that one's file system.
func (d *Driver) knows(want volume.Spec, mayDefer bool) error {
	if want.Block || d.Defers && mayDefer {
		return nil
	}
	f := mounter.ProbeFilesystem(want.FSType)
	switch {
	case f.Answer != mounter.No:
		return nil
	case want.SourceVolume+want.SourceSnapshot != "":
		return fault.New(fault.State, "the kernel of node %s does not support file system %s, which the origin has (%s): only a sandbox can "+
			"mount the copy, with CRUST on the node and a class with %s", d.NodeID, want.FSType, f.Why, crust.AllowParameter)
	}
	return fault.New(fault.Elsewhere, "the kernel of node %s does not support file system %s (%s); choose another file system, or another node",
		d.NodeID, want.FSType, f.Why)
}

func checkName(name string) error {
	switch {
	case name == "":
		return invalid("name is missing")
	case len(name) > maxNameLength:
		return invalid("name is %d bytes long; CSI allows %d", len(name), maxNameLength)
	}
	for _, c := range name {
		if c < 0x20 || c == 0x7f {
			return invalid("name %q contains control characters", name)
		}
	}
	return nil
}

// source reads what a volume is copied from, and returns its size in bytes. A copy is in its
// origin's pool.
func (d *Driver) source(ctx context.Context, s *csi.VolumeContentSource, spec *volume.Spec, poolName *string) (int64, error) {
	if s == nil {
		return 0, nil
	}
	var id, fstype string
	var size int64
	var block bool
	var err error
	switch {
	case s.GetSnapshot() != nil:
		id = s.GetSnapshot().GetSnapshotId()
		if id == "" {
			return 0, invalid("volume_content_source: snapshot_id is missing")
		}
		var snap volume.Snapshot
		snap, err = d.findSnapshot(ctx, id)
		spec.SourceSnapshot, size, fstype, block = id, snap.Size, snap.FSType, snap.Block
	case s.GetVolume() != nil:
		id = s.GetVolume().GetVolumeId()
		if id == "" {
			return 0, invalid("volume_content_source: volume_id is missing")
		}
		var v volume.Volume
		v, err = d.found(ctx, id)
		spec.SourceVolume, size, fstype, block = id, v.Size, v.FSType, v.Block
	default:
		return 0, invalid("volume_content_source names neither a snapshot nor a volume")
	}
	if err == nil || fault.Is(err, fault.NotFound) {
		// An earlier call may have made the copy before its origin was deleted, or grew.
		have, ok, lerr := d.copied(ctx, id, *spec)
		if lerr != nil {
			return 0, lerr
		}
		if ok {
			size, fstype, block, err = 0, have.FSType, have.Block, nil // its size is compared later
		}
	}
	if err != nil {
		return 0, err
	}
	owner, ok := d.Volumes.OwnerOf(id)
	if !ok {
		return 0, invalid("%s belongs to no pool of this node, so it cannot be copied", id)
	}
	if *poolName != "" && *poolName != owner.Name() {
		return 0, invalid("%s is in pool %s; a copy cannot be made in pool %s", id, owner.Name(), *poolName)
	}
	*poolName = owner.Name()
	if spec.FSType == "" && !spec.Block {
		spec.FSType = fstype
	}
	if block != spec.Block || fstype != spec.FSType {
		return 0, invalid("%s is %s; a copy of it cannot be asked for as %s", id, kindOf(block, fstype), kindOf(spec.Block, spec.FSType))
	}
	return size, nil
}

// copied returns the volume of that name if it copies that origin. A copy is in its origin's pool.
func (d *Driver) copied(ctx context.Context, origin string, spec volume.Spec) (volume.Volume, bool, error) {
	pool, ok := d.Volumes.OwnerOf(origin)
	if !ok {
		return volume.Volume{}, false, nil
	}
	have, err := askPool(ctx, d, pool, func() (volume.Volume, error) { return pool.Get(volume.VolumeID(pool.Name(), spec.Name)) })
	if fault.Is(err, fault.NotFound) {
		return have, false, nil
	}
	return have, err == nil && have.SourceSnapshot == spec.SourceSnapshot && have.SourceVolume == spec.SourceVolume, err
}

func kindOf(block bool, fstype string) string {
	if block {
		return "a block volume"
	}
	return "a volume with " + fstype
}

func (d *Driver) segments() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{d.topology: d.NodeID}}
}

// checkTopology refuses a volume that would be in the wrong place here.
func (d *Driver) checkTopology(r *csi.TopologyRequirement) error {
	if len(r.GetRequisite()) == 0 {
		return nil
	}
	for _, t := range r.GetRequisite() {
		if d.here(t) {
			return nil
		}
	}
	return fault.New(fault.Elsewhere, "the volume is wanted elsewhere: this node is %s=%s, and no requisite topology includes it",
		d.topology, d.NodeID)
}

func (d *Driver) here(t *csi.Topology) bool {
	for k, v := range t.GetSegments() {
		if k == d.topology && v != d.NodeID {
			return false
		}
	}
	_, ok := t.GetSegments()[d.topology]
	return ok || len(t.GetSegments()) == 0
}

func (d *Driver) describe(v volume.Volume) *csi.Volume {
	out := &csi.Volume{
		VolumeId: v.ID, CapacityBytes: v.Size,
		AccessibleTopology: []*csi.Topology{d.segments()},
	}
	switch {
	case v.SourceSnapshot != "":
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.SourceSnapshot}}}
	case v.SourceVolume != "":
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.SourceVolume}}}
	}
	return out
}

// listName is the volume context key of a volume's name in ListVolumes and
// ControllerGetVolume.
const listName = "csi.crust.dev/name"

func (d *Driver) describeWhole(v volume.Volume) *csi.Volume {
	out := d.describe(v)
	out.VolumeContext = map[string]string{listName: v.Name}
	return out
}

// DeleteVolume destroys a recorded volume by its exact id (D03).
func (d *Driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := required("volume_id", id); err != nil {
		return nil, err
	}
	if err := d.isHere(ctx, id); err != nil {
		return nil, err
	}
	pool, ok := d.Volumes.OwnerOf(id)
	if !ok {
		// No pool of this node made it. The driver never deletes a static volume.
		return &csi.DeleteVolumeResponse{}, nil
	}
	err := d.inPool(ctx, "DeleteVolume", pool, func(ctx context.Context, _ *volume.Progress) error {
		if targets := d.publishedAt(pool, id); len(targets) > 0 {
			return fault.New(fault.State, "volume %s is published at %s; unpublish it first", id, targets[0])
		}
		if err := d.notDeferred(id); err != nil {
			return err
		}
		if r, ok := d.staged.get(id); ok {
			return fault.New(fault.State, "volume %s is staged at %s; unstage it first", id, r.StagingPath)
		}
		_, err := pool.Get(id)
		if fault.Is(err, fault.NotFound) {
			err = pool.Delete(ctx, id) // nothing, or what a crash or a failed call left
		} else {
			err = d.irreversible(ctx, audit.Event{Action: audit.Deleted, Volume: id}, func() error { return pool.Delete(ctx, id) })
		}
		if err == nil {
			d.refused.note(id, nil)
			d.lost.forget(id)
			d.damaged.forget(id) // whoever was refused a stage does not unstage
		}
		return err
	}, id)
	if err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}
