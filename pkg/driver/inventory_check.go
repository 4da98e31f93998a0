package driver

import (
	"context"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// CheckPools reports inconsistencies in the pools. It leaves out work under way: a finding must
// appear twice, without an operation on its volume during the second look.
func (i inventoryServer) CheckPools(ctx context.Context, req *inventory.CheckPoolsRequest) (*inventory.CheckPoolsResponse, error) {
	pools := i.driver.Volumes.Pools()
	if req.GetPool() != "" {
		p, err := i.driver.Volumes.Pool(req.GetPool())
		if err != nil {
			return nil, fault.New(fault.NotFound, "%w", err)
		}
		pools = []volume.Pool{p}
	}
	resp := &inventory.CheckPoolsResponse{}
	for _, p := range pools {
		out := &inventory.CheckedPool{Name: p.Name()}
		found, err := i.driver.checkPool(ctx, p)
		if err != nil {
			out.Trouble = err.Error()
		}
		for _, f := range found {
			out.Findings = append(out.Findings, &inventory.Finding{Kind: string(f.Kind), Id: f.ID, Path: f.Path, Means: f.Means, Do: f.Do})
		}
		resp.Pools = append(resp.Pools, out)
	}
	return resp, nil
}

// checkPool checks a pool, one check at a time, until its caller leaves.
func (d *Driver) checkPool(ctx context.Context, p volume.Pool) ([]volume.Finding, error) {
	var found []volume.Finding
	err := d.inPool(ctx, "CheckPools", p, func(context.Context, *volume.Progress) (err error) {
		found, err = d.lookTwice(p)
		return err
	}, "the check of pool "+p.Name())
	if err != nil {
		return nil, err // the check may still run, and write to found
	}
	return found, nil
}

// lookTwice returns the findings that appear twice.
func (d *Driver) lookTwice(p volume.Pool) ([]volume.Finding, error) {
	first, err := d.lookAtPool(p)
	if err != nil || len(first) == 0 {
		return nil, err
	}
	busy := d.ops.held()
	second, err := d.lookAtPool(p)
	if err != nil {
		return nil, err
	}
	maps.Copy(busy, d.ops.held())
	var found []volume.Finding
	for _, f := range second {
		seen := slices.ContainsFunc(first, func(g volume.Finding) bool { return f.Kind == g.Kind && f.Path == g.Path })
		if seen && !busy[f.ID] {
			found = append(found, f)
		}
	}
	return found, nil
}

func (d *Driver) lookAtPool(p volume.Pool) ([]volume.Finding, error) {
	found, err := p.Check()
	if err != nil {
		return nil, err
	}
	staged := d.staged.all()
	for _, id := range sortedKeys(staged) {
		if owner, ok := d.Volumes.OwnerOf(id); !ok || owner.Name() != p.Name() {
			continue
		}
		// Not Attached: it would undo what pods changed on a device.
		owner, ok, err := p.Owns(staged[id].Device)
		if err != nil {
			return nil, err
		}
		if ok && owner == id {
			continue
		}
		found = append(found, volume.Finding{
			Kind: volume.StagedWithoutDevice, ID: id, Path: staged[id].Device.Path,
			Means: "the volume is on record as staged, and this device is not bound to its file any more: its pods cannot use it",
			Do:    "end its pods: the volume is unstaged then, and staged anew for the next",
		})
	}
	return found, nil
}

// DescribeOperations lists the running calls and the walks for fsGroup, the oldest first.
func (i inventoryServer) DescribeOperations(
	context.Context, *inventory.DescribeOperationsRequest,
) (*inventory.DescribeOperationsResponse, error) {
	resp := &inventory.DescribeOperationsResponse{Walks: i.driver.walks.describe()}
	for op, on := range i.driver.ops.all() {
		slices.Sort(on)
		resp.Operations = append(resp.Operations, &inventory.Operation{
			Call: op.what, On: on, Since: timestamppb.New(op.since), Progress: op.progress.String(),
		})
	}
	slices.SortFunc(resp.Operations, func(a, b *inventory.Operation) int {
		if c := a.GetSince().AsTime().Compare(b.GetSince().AsTime()); c != 0 {
			return c
		}
		return strings.Compare(strings.Join(a.GetOn(), " "), strings.Join(b.GetOn(), " "))
	})
	return resp, nil
}

// held returns running operations' keys.
func (o *operations) held() map[string]bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	held := map[string]bool{}
	for key := range o.running {
		held[key] = true
	}
	return held
}

// all returns the running operations, with the keys of each.
func (o *operations) all() map[*operation][]string {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := map[*operation][]string{}
	for key, op := range o.running {
		all[op] = append(all[op], key)
	}
	return all
}
