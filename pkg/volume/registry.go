package volume

import (
	"sort"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Registry finds the source of a volume.
type Registry struct {
	pools  map[string]Pool
	names  []string
	static StaticSource
}

// StaticSource is a Source of volumes that somebody else made; a request says
// where they are.
type StaticSource interface {
	Source
	// Claims tells whether the attributes describe a static volume.
	Claims(attributes map[string]string) bool
	// Adopt takes a volume as the attributes describe it. A second time it must
	// be described in the same way.
	Adopt(id string, attributes map[string]string) (Volume, error)
	// Remember takes up a device that an earlier process attached.
	Remember(id string, d mounter.Device)
	// Release gives up what Attach claimed for a volume that is not staged.
	Release(id string)
}

// NewRegistry knows these pools, in this order (the first is the default), and
// one static source, which may be nil.
func NewRegistry(static StaticSource, pools ...Pool) (*Registry, error) {
	r := &Registry{pools: map[string]Pool{}, static: static}
	for _, p := range pools {
		if _, ok := r.pools[p.Name()]; ok {
			return nil, fault.New(fault.Invalid, "two pools are called %q", p.Name())
		}
		r.pools[p.Name()] = p
		r.names = append(r.names, p.Name())
	}
	return r, nil
}

// Pools gives the pools in order.
func (r *Registry) Pools() []Pool {
	list := make([]Pool, len(r.names))
	for i, n := range r.names {
		list[i] = r.pools[n]
	}
	return list
}

// Pool gives a pool by name; an empty name is the first one. A pool that this node does not
// have is a fault Elsewhere: another node may have it.
func (r *Registry) Pool(name string) (Pool, error) {
	if len(r.names) == 0 {
		return nil, fault.New(fault.Elsewhere, "this node has no pool, so no volume can be made here")
	}
	if name == "" {
		name = r.names[0]
	}
	p, ok := r.pools[name]
	if !ok {
		if err := CheckPoolName(name); err != nil {
			return nil, err
		}
		return nil, fault.New(fault.Elsewhere, "pool %q is not on this node; it has %s", name, strings.Join(r.names, ", "))
	}
	return p, nil
}

// OwnerOfDevice asks each source for the volume that a device in use belongs to. A pool that is away is not
// asked: its volumes are those that are staged and of no pool that is here.
func OwnerOfDevice[S Releaser](sources []S, d mounter.Device) (id string, ok bool, err error) {
	for _, s := range sources {
		id, ok, err := s.Owns(d)
		if fault.Is(err, fault.Unavailable) {
			continue
		}
		if err != nil || ok {
			return id, ok, err
		}
	}
	return "", false, nil
}

// OwnerOf gives the pool that an id of a volume or snapshot belongs to.
func (r *Registry) OwnerOf(id string) (Pool, bool) {
	name, _, _, ok := ParseID(id)
	if !ok {
		return nil, false
	}
	p, ok := r.pools[name]
	return p, ok
}

// CheckPool refuses an id that a pool made which this node does not have (any
// more), or which is away: nobody can tell what is to be done with such a volume.
func (r *Registry) CheckPool(id string) error {
	name, _, _, ok := ParseID(id)
	if !ok {
		return nil
	}
	if p, ok := r.pools[name]; ok {
		if a, ok := p.(interface{ Away() error }); ok {
			return a.Away()
		}
		return nil
	}
	return fault.New(fault.State, "%s is of pool %q, which this node does not have (it has %s); start the driver with that pool again", id,
		name, strings.Join(r.names, ", "))
}

// Find gives a known volume and its source, or a fault NotFound.
func (r *Registry) Find(id string) (Source, Volume, error) {
	if p, ok := r.OwnerOf(id); ok {
		v, err := p.Get(id)
		return p, v, err
	}
	if r.static != nil {
		v, err := r.static.Get(id)
		return r.static, v, err
	}
	return nil, Volume{}, fault.New(fault.NotFound, "volume %s does not exist on this node", id)
}

// FindOrAdopt is Find, and for a volume that attributes describe as a static
// one, takes it.
func (r *Registry) FindOrAdopt(id string, attributes map[string]string) (Source, Volume, error) {
	if r.static == nil || !r.static.Claims(attributes) {
		return r.Find(id)
	}
	if p, ok := r.OwnerOf(id); ok {
		if _, err := p.Get(id); err == nil {
			return nil, Volume{}, fault.New(fault.Invalid, "volume %s is one of pool %s; it cannot have the attributes of a static volume", id,
				p.Name())
		}
	}
	v, err := r.static.Adopt(id, attributes)
	return r.static, v, err
}

// List gives all volumes of all sources, by id.
func (r *Registry) List() []Volume {
	var all []Volume
	for _, p := range r.Pools() {
		all = append(all, p.List()...)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].ID < all[j].ID })
	return all
}

// Static gives the static source, nil when there is none.
func (r *Registry) Static() StaticSource { return r.static }
