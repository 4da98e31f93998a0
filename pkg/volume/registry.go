package volume

import (
	"fmt"
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

// StaticSource is a Source of volumes that somebody else made. A request tells where they are.
type StaticSource interface {
	Source
	// Claims reports whether the attributes describe a static volume.
	Claims(attributes map[string]string) bool
	// Attribute reports whether a key of the attributes is one for static volumes. A value that it cannot have is a fault Invalid.
	Attribute(attributes map[string]string, key string) (ok bool, err error)
	// AttributeNames lists those keys for an error's text.
	AttributeNames() string
	// Shared reports whether the attributes describe a network share.
	Shared(attributes map[string]string) bool
	// Adopt accepts a volume as the attributes describe it. Later calls must describe it in the
	// same way.
	Adopt(id string, attributes map[string]string) (Volume, error)
	// Remember registers a device that an earlier process attached.
	Remember(id string, d mounter.Device)
	// Recall returns the device that the volume had last, if the device is still there.
	Recall(id string) (d mounter.Device, ok bool)
	// Release drops what Attach claimed for a volume that is not staged.
	Release(id string)
	// Held reports whether somebody uses the device that the volume was attached with, wherever its path leads now. It is false if that
	// device is gone from this machine.
	Held(id string) (bool, error)
}

// NewRegistry returns a registry of these pools, in this order (the first is the default), and
// one static source, which may be nil. Two pools with one name, and sizes that make no sense, are
// a fault Invalid.
func NewRegistry(static StaticSource, pools ...Pool) (*Registry, error) {
	r := &Registry{pools: map[string]Pool{}, static: static}
	for _, p := range pools {
		if _, ok := r.pools[p.Name()]; ok {
			return nil, fault.New(fault.Invalid, "two pools are called %q", p.Name())
		}
		if err := p.Sizes().check(); err != nil {
			return nil, fmt.Errorf("pool %q: %w", p.Name(), err)
		}
		r.pools[p.Name()] = p
		r.names = append(r.names, p.Name())
	}
	return r, nil
}

// Pools returns the pools in order.
func (r *Registry) Pools() []Pool {
	list := make([]Pool, len(r.names))
	for i, n := range r.names {
		list[i] = r.pools[n]
	}
	return list
}

// Pool returns a pool by name; an empty name means the first. A pool that this node does not
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

// OwnerOfDevice asks each source which volume the device belongs to. If no source has the device and a pool that may have it is
// unavailable, the error is that pool's (fault Unavailable): "cannot tell" is not "no".
func OwnerOfDevice[S Releaser](sources []S, d mounter.Device) (id string, ok bool, err error) {
	var away error
	for _, s := range sources {
		id, ok, err := s.Owns(d)
		if fault.Is(err, fault.Unavailable) {
			away = err
			continue
		}
		if err != nil || ok {
			return id, ok, err
		}
	}
	return "", false, away
}

// AvailableOwnerOfDevice is OwnerOfDevice of the available sources only. Its "no" says nothing about the others.
func AvailableOwnerOfDevice[S Releaser](sources []S, d mounter.Device) (id string, ok bool, err error) {
	id, ok, err = OwnerOfDevice(sources, d)
	if fault.Is(err, fault.Unavailable) {
		return "", false, nil
	}
	return id, ok, err
}

// OwnerOf returns the pool to which the id of a volume or snapshot belongs.
func (r *Registry) OwnerOf(id string) (Pool, bool) {
	name, _, _, ok := ParseID(id)
	if !ok {
		return nil, false
	}
	p, ok := r.pools[name]
	return p, ok
}

// CheckPool refuses the id of a pool that this node does not have (any more) or that is
// unavailable. The state of such a volume is unknown.
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

// Find returns a known volume and its source, or a fault NotFound.
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

// FindOrAdopt is like Find, but adopts a volume that the attributes describe as static.
func (r *Registry) FindOrAdopt(id string, attributes map[string]string) (Source, Volume, error) {
	if r.static == nil || !r.static.Claims(attributes) {
		return r.Find(id)
	}
	if p, ok := r.OwnerOf(id); ok {
		if _, err := p.Get(id); err == nil {
			return nil, Volume{}, fault.New(fault.Invalid,
				"volume %s is one of pool %s; it cannot have the attributes of a static volume", id, p.Name())
		}
	}
	v, err := r.static.Adopt(id, attributes)
	return r.static, v, err
}

// List returns all volumes of all pools, by id.
func (r *Registry) List() []Volume {
	var all []Volume
	for _, p := range r.Pools() {
		all = append(all, p.List()...)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].ID < all[j].ID })
	return all
}

// Static returns the static source, or nil.
func (r *Registry) Static() StaticSource { return r.static }
