package driver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"sort"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// inventoryServer reports what this node has, and who uses it.
type inventoryServer struct {
	inventory.UnimplementedInventoryServer
	driver *Driver
}

// RegisterInventory registers the service beside CSI from which crustctl and csi-steward learn what
// this node has.
func (d *Driver) RegisterInventory(s grpc.ServiceRegistrar) {
	inventory.RegisterInventoryServer(s, inventoryServer{driver: d})
}

// onePage is how many volumes one answer has; it stays far below gRPC's 4 MiB.
const onePage = 1000

// DescribePools lists the pools and their problems.
func (i inventoryServer) DescribePools(ctx context.Context, _ *inventory.DescribePoolsRequest) (*inventory.DescribePoolsResponse, error) {
	resp := &inventory.DescribePoolsResponse{}
	for _, p := range i.driver.Volumes.Pools() {
		out := &inventory.Pool{Name: p.Name(), Volumes: int32(len(p.List())), Snapshots: int32(len(p.ListSnapshots()))}
		err := i.driver.usable(ctx, p)
		c, serr := askSizes(ctx, i.driver, p, p.Capacity)
		if err = cmp.Or(err, serr); serr == nil {
			out.Size, out.Available, out.Used, out.Promised, out.Left = c.Total, c.Available, c.Used, c.Promised, c.Left
		}
		if err != nil {
			out.Trouble = err.Error()
		}
		resp.Pools = append(resp.Pools, out)
	}
	var err error
	resp.Former, err = i.driver.formerPools(ctx)
	return resp, err
}

// formerPools returns the former pools that are not certainly empty.
func (d *Driver) formerPools(ctx context.Context) (former []*inventory.FormerPool, err error) {
	if d.FormerPools == nil {
		return nil, nil
	}
	all, err := d.FormerPools()
	if err != nil {
		return nil, fmt.Errorf("which pools this node had: %w", err)
	}
	for _, p := range all {
		if _, err := ask(ctx, d, subject{aFormerPool, p.Name}, func() (struct{}, error) { return struct{}{}, p.Empty() }); err != nil {
			former = append(former, &inventory.FormerPool{Name: p.Name, Directory: p.Dir, Content: err.Error(), Record: p.Record})
		}
	}
	return former, nil
}

// DescribeVolumes lists one page of the volumes.
func (i inventoryServer) DescribeVolumes(
	ctx context.Context, req *inventory.DescribeVolumesRequest,
) (*inventory.DescribeVolumesResponse, error) {
	d := i.driver
	list := d.Volumes.List()
	staged := d.staged.all()
	for _, v := range list {
		delete(staged, v.ID)
	}
	for id, r := range staged {
		v := volume.Volume{ID: id, FSType: r.FSType, Block: r.Block, Share: r.Share != ""}
		if known, err := d.found(ctx, id); err == nil {
			known.FSType = cmp.Or(known.FSType, known.Facts.Formatted, r.FSType)
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
		resp.Volumes = append(resp.Volumes, d.inventoryOf(ctx, v))
	}
	return resp, nil
}

func (d *Driver) inventoryOf(ctx context.Context, v volume.Volume) *inventory.Volume {
	out := &inventory.Volume{
		Id: v.ID, Name: v.Name, Claim: inventory.ClaimOf(v.Parameters), Size: v.Size, FsType: v.FSType, Thick: v.Thick,
		Source: v.SourceSnapshot + v.SourceVolume,
	}
	if !v.Created.IsZero() {
		out.Created = timestamppb.New(v.Created)
	}
	if pool, ok := d.Volumes.OwnerOf(v.ID); ok {
		out.Pool = pool.Name()
		// 0 if the pool cannot be read.
		out.Allocated, _ = askSizes(ctx, d, pool, func() (int64, error) { return pool.Allocated(v.ID) })
	}
	if r, ok := d.staged.get(v.ID); ok {
		out.Staged, out.Device = true, r.Device.Path+r.Share
		if d.grows(r, v) {
			out.Notices = append(out.Notices, growthWaits(v))
		}
	}
	d.identifyWithin(ctx, v.ID)
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

// growthWaits says what to do about a file system that is smaller than its device. Every growth is
// briefly in this state; csi-steward reports only what lasts.
func growthWaits(v volume.Volume) *inventory.Notice {
	size := ""
	if v.Size > 0 { // unknown for a static volume's device
		size = fmt.Sprintf(" to %d MiB", v.Size>>20)
	}
	return &inventory.Notice{Reason: "GrowthWaits", Message: "it was enlarged" + size + ", and its file system has not grown yet: " +
		"it cannot while the volume is in use, or growth has failed. Delete all pods that use it, and make them again: " +
		"the file system grows before the first of them has it"}
}

func (d *Driver) use(id, target string) *inventory.Use {
	e := d.users.of(id, target, d.Audit.events)
	return &inventory.Use{Target: target, Pod: e.Pod, PodUid: e.PodUID}
}

// users remembers which pod has a volume at a target, if the kubelet passes it (podInfoOnMount). It
// is not stored: the first query reads from the audit log what earlier processes knew.
type users struct {
	mu   sync.Mutex
	m    map[string]audit.Event // by volume and target
	read bool                   // the audit log was read
}

func (u *users) note(e audit.Event) {
	switch {
	case e.Outcome != audit.Done:
	case e.Action == audit.Taken:
		u.forget(e.Volume, e.Target)
	case (e.Action == audit.Given || e.Action == audit.Deferred) && e.Pod != "":
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.m == nil {
			u.m = map[string]audit.Event{}
		}
		u.m[e.Volume+"\x00"+e.Target] = audit.Event{Pod: e.Pod, PodUID: e.PodUID}
	}
}

func (u *users) forget(id, target string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.m, id+"\x00"+target)
}

// of returns the pod of a target that is published now.
func (u *users) of(id, target string, history func() ([]audit.Event, error)) audit.Event {
	u.mu.Lock()
	e, ok := u.m[id+"\x00"+target]
	if ok || u.read {
		u.mu.Unlock()
		return e
	}
	u.mu.Unlock() // a publish does not wait for the read
	events, err := history()
	if err != nil {
		return e // crustctl shows the target instead of the pod
	}
	before := users{m: map[string]audit.Event{}}
	for _, e := range events {
		before.note(e)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.Copy(before.m, u.m) // this process's knowledge is newer
	u.m, u.read = before.m, true
	return u.m[id+"\x00"+target]
}

// The provisioner's keys for a volume's claim.
const (
	claimNamespace = inventory.ClaimNamespaceKey
	claimName      = inventory.ClaimNameKey
)
