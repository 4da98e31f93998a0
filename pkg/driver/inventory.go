package driver

import (
	"context"
	"maps"
	"sort"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Inventory tells crustctl what this node has, and who uses it.
type Inventory struct {
	inventory.UnimplementedInventoryServer
	Driver *Driver
}

// onePage is how many volumes one answer has: it stays far below gRPC's 4 MiB.
const onePage = 1000

// DescribePools gives the pools, with what is wrong with them.
func (i Inventory) DescribePools(context.Context, *inventory.DescribePoolsRequest) (*inventory.DescribePoolsResponse, error) {
	resp := &inventory.DescribePoolsResponse{}
	for _, p := range i.Driver.Volumes.Pools() {
		out := &inventory.Pool{Name: p.Name(), Volumes: int32(len(p.List())), Snapshots: int32(len(p.ListSnapshots()))}
		c, err := p.Capacity()
		if err == nil {
			out.Size, out.Available, out.Used, out.Promised, out.Left = c.Total, c.Available, c.Used, c.Promised, c.Left
			err = p.Usable()
		}
		if err != nil {
			out.Trouble = err.Error()
		}
		resp.Pools = append(resp.Pools, out)
	}
	return resp, nil
}

// DescribeVolumes gives one page of the volumes.
func (i Inventory) DescribeVolumes(_ context.Context, req *inventory.DescribeVolumesRequest) (*inventory.DescribeVolumesResponse, error) {
	d := i.Driver
	list := d.Volumes.List()
	staged := d.staged.all()
	for _, v := range list {
		delete(staged, v.ID)
	}
	for id, r := range staged {
		v := volume.Volume{ID: id, FSType: r.FSType, Block: r.Block, Share: r.Share != ""}
		if _, known, err := d.Volumes.Find(id); err == nil {
			v = known
		}
		list = append(list, v)
	}
	sortBy(list, func(v volume.Volume) string { return v.ID })
	list = list[sort.Search(len(list), func(n int) bool { return list[n].ID > req.GetAfter() }):]
	resp := &inventory.DescribeVolumesResponse{}
	if len(list) > onePage {
		list = list[:onePage]
		resp.After = list[onePage-1].ID
	}
	for _, v := range list {
		resp.Volumes = append(resp.Volumes, d.inventoryOf(v))
	}
	return resp, nil
}

func (d *Driver) inventoryOf(v volume.Volume) *inventory.Volume {
	out := &inventory.Volume{
		Id: v.ID, Name: v.Name, Claim: claimOf(v.Parameters), Size: v.Size, FsType: v.FSType, Thick: v.Thick, Source: v.SourceSnapshot + v.SourceVolume,
	}
	if !v.Created.IsZero() {
		out.Created = timestamppb.New(v.Created)
	}
	if out.FsType == "" {
		out.FsType = v.Facts.Formatted // of a static volume
	}
	if pool, ok := d.Volumes.OwnerOf(v.ID); ok {
		out.Pool = pool.Name()
		out.Allocated, _ = pool.Allocated(v.ID) // of a pool that is away nobody knows
	}
	if r, ok := d.staged.get(v.ID); ok {
		out.Staged, out.Device = true, r.Device.Path+r.Share
	}
	for _, target := range d.published.of(v.ID) {
		use := d.use(v.ID, target)
		use.ReadOnly = d.published.shown(v.ID, target).ReadOnly != writable
		out.Uses = append(out.Uses, use)
	}
	for _, r := range d.deferrals.of(v.ID) {
		use := d.use(v.ID, r.Target)
		use.Deferred, use.ReadOnly = true, r.readOnly()
		out.Uses = append(out.Uses, use)
	}
	return out
}

func (d *Driver) use(id, target string) *inventory.Use {
	e := d.users.of(id, target, func() ([]audit.Event, error) {
		if d.Audit == nil {
			return nil, nil
		}
		events, _, err := audit.Read(d.StateDir)
		return events, err
	})
	return &inventory.Use{Target: target, Pod: e.Pod, PodUid: e.PodUID}
}

// users knows which pod has a volume at a target, as far as the kubelet told. Nothing
// is written for it: what earlier processes were told stands in the audit log, which
// is read when somebody asks first.
type users struct {
	reading sync.Once
	mu      sync.Mutex
	m       map[string]audit.Event // by volume and target
}

func (u *users) note(e audit.Event) {
	key := e.Volume + "\x00" + e.Target
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case e.Outcome != audit.Done:
	case e.Action == audit.Taken:
		delete(u.m, key)
	case (e.Action == audit.Given || e.Action == audit.Deferred) && e.Pod != "":
		if u.m == nil {
			u.m = map[string]audit.Event{}
		}
		u.m[key] = audit.Event{Pod: e.Pod, PodUID: e.PodUID}
	}
}

// of gives the pod of a target that is published now.
func (u *users) of(id, target string, history func() ([]audit.Event, error)) audit.Event {
	if e, ok := u.known(id, target); ok {
		return e
	}
	u.reading.Do(func() {
		var before users
		events, _ := history() // without it the pod is not known; its target is
		for _, e := range events {
			before.note(e)
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		maps.Copy(before.m, u.m) // what this process was told is newer
		if before.m != nil {
			u.m = before.m
		}
	})
	e, _ := u.known(id, target)
	return e
}

func (u *users) known(id, target string) (audit.Event, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	e, ok := u.m[id+"\x00"+target]
	return e, ok
}

// claimOf is NAMESPACE/NAME of the claim that a volume was made for.
func claimOf(parameters map[string]string) string {
	return join(parameters[claimNamespace], parameters[claimName])
}

// The keys by which the provisioner tells for whom a volume is (its flag
// --extra-create-metadata).
const (
	claimNamespace = orchestratorPrefix + "pvc/namespace"
	claimName      = orchestratorPrefix + "pvc/name"
)
