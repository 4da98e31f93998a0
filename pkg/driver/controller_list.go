package driver

import (
	"context"
	"errors"
	"math/bits"
	"sort"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// page returns the part of a list, sorted by id, that a token and a limit select. A token is the
// last id of the previous page.
func page[T any](list []T, id func(T) string, token string, most int32, snapshots bool) ([]T, string, error) {
	if most < 0 {
		return nil, "", invalid("max_entries %d is negative", most)
	}
	if token != "" {
		if _, _, snap, ok := volume.ParseID(token); !ok || snap != snapshots {
			return nil, "", fault.New(fault.Busy, "starting_token %q is none that this driver gave; start again without one", token)
		}
		at := sort.Search(len(list), func(i int) bool { return id(list[i]) > token })
		list = list[at:]
	}
	if most == 0 || int(most) >= len(list) {
		return list, "", nil
	}
	return list[:most], id(list[most-1]), nil
}

// ListVolumes lists the volumes of all pools.
func (d *Driver) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	list, next, err := page(d.Volumes.List(), func(v volume.Volume) string { return v.ID }, req.GetStartingToken(),
		req.GetMaxEntries(), false)
	if err != nil {
		return nil, err
	}
	resp := &csi.ListVolumesResponse{NextToken: next}
	for _, v := range list {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: d.describeWhole(v)})
	}
	return resp, nil
}

// ControllerGetVolume returns one volume.
func (d *Driver) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	if err := required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	v, err := d.found(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: d.describeWhole(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{},
	}, nil
}

// GetCapacity returns what a pool can still promise: the size, in bytes, of the largest volume that
// CreateVolume would make.
func (d *Driver) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	params, err := ParseParameters(req.GetParameters())
	if err != nil {
		// CreateVolume refuses such a class, and its error reaches the claim's events. An error
		// here reaches nobody: the pod would wait for room for ever.
		params = Parameters{Pool: req.GetParameters()["pool"]}
	}
	var minimum int64
	if u, err := parseUses(req.GetVolumeCapabilities(), false); err == nil {
		if name, err := u.creatable(); err == nil {
			minimum = fstype.Of(name).Minimum
		}
	}
	if t := req.GetAccessibleTopology(); t != nil && !d.here(t) {
		return &csi.GetCapacityResponse{}, nil
	}
	pool, err := d.Volumes.Pool(params.Pool)
	if fault.Is(err, fault.Invalid) {
		pool, err = d.Volumes.Pool("") // no node can have a pool of that name: CreateVolume refuses it, too
	}
	if err != nil {
		// Another node may have the pool.
		if d.unknownPools.first(params.Pool) {
			d.Log.Warn("a StorageClass wants a pool that this node does not have, so no pod with such a claim runs here", "error", err)
		}
		return &csi.GetCapacityResponse{}, nil
	}
	c, err := askSizes(ctx, d, pool, pool.Capacity)
	if fault.Is(err, fault.Unavailable) && !errors.Is(err, errNoAnswer) && !errors.Is(err, errCounting) { // it is away
		return &csi.GetCapacityResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	left := c.Left
	if params.Thick {
		left = min(left, c.Available)
	}
	sizes := pool.Sizes()
	left = offered(left, sizes)
	return &csi.GetCapacityResponse{
		AvailableCapacity: left,
		MinimumVolumeSize: wrapInt64(max(minimum, sizes.Fine)), MaximumVolumeSize: wrapInt64(min(left, sizes.Most/sizes.Fine*sizes.Fine)),
	}, nil
}

// offered is the size that GetCapacity tells of what is left. CreateVolume rounds up to sizes.Step.
func offered(left int64, sizes volume.Sizes) int64 {
	return coarse(left) / sizes.Step * sizes.Step
}

// coarse rounds a number of bytes down to eight significant bits, by less than 1 %. Every write to
// a node's disk changes what is left, and external-provisioner writes each change to the API
// server, for each class: 5,000 idle nodes made 250 writes a second.
func coarse(size int64) int64 {
	const significant = 8
	drop := bits.Len64(uint64(max(size, 0))) - significant
	if drop <= 0 {
		return size
	}
	return size >> drop << drop
}

// names are those already logged.
type names struct {
	mu   sync.Mutex
	said map[string]bool
}

// first tells whether a name is new. A full set says no: the names come from outside.
func (n *names) first(name string) bool {
	const most = 64
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.said[name] || len(n.said) >= most {
		return false
	}
	if n.said == nil {
		n.said = map[string]bool{}
	}
	n.said[name] = true
	return true
}
