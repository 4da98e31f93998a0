package mounter

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// IDRange is one line of an id map: Count ids, starting at Disk in the file system and at Shown
// for processes.
type IDRange struct{ Disk, Shown, Count uint32 }

// IDMap maps the ids on disk to those that an idmapped mount shows, see mount_setattr(2). An id
// outside of all ranges shows as the overflow id and cannot be used.
type IDMap struct{ UIDs, GIDs []IDRange }

const allIDs = 1<<32 - 1 // the id 4294967295 is invalid

// ShowGroup returns the map that shows the group disk as the group shown, and the other way
// round, because a map is one to one. All other ids are unchanged.
func ShowGroup(disk, shown uint32) IDMap {
	m := IDMap{UIDs: []IDRange{{0, 0, allIDs}}}
	low, high := min(disk, shown), max(disk, shown)
	if low == high {
		m.GIDs = m.UIDs
		return m
	}
	for _, r := range []IDRange{
		{0, 0, low}, {low, high, 1}, {low + 1, low + 1, high - low - 1}, {high, low, 1}, {high + 1, high + 1, allIDs - high - 1},
	} {
		if r.Count > 0 {
			m.GIDs = append(m.GIDs, r)
		}
	}
	return m
}

// checkRanges refuses what no kernel takes, with a fault Invalid.
func checkRanges(of string, ranges []IDRange) error {
	if len(ranges) == 0 {
		return fault.New(fault.Invalid, "an id map without %s", of)
	}
	for i, r := range ranges {
		if r.Count == 0 || uint64(r.Disk)+uint64(r.Count) > allIDs || uint64(r.Shown)+uint64(r.Count) > allIDs {
			return fault.New(fault.Invalid, "an id map has a range of %s that has no ids, or ids beyond 4294967294: %+v", of, r)
		}
		for _, o := range ranges[:i] {
			if meet(r.Disk, r.Count, o.Disk, o.Count) || meet(r.Shown, r.Count, o.Shown, o.Count) {
				return fault.New(fault.Invalid, "an id map has ranges of %s that overlap: %+v and %+v", of, o, r)
			}
		}
	}
	return nil
}

// meet tells whether two ranges of ids have one in common.
func meet(a, ofA, b, ofB uint32) bool {
	return uint64(a) < uint64(b)+uint64(ofB) && uint64(b) < uint64(a)+uint64(ofA)
}

func lines(ranges []IDRange) string {
	var b strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&b, "%d %d %d\n", r.Disk, r.Shown, r.Count)
	}
	return b.String()
}

// userNamespaces caches the namespaces of maps that were used, because making one costs a copy
// of this process.
var userNamespaces struct {
	sync.Mutex
	m     map[string]*os.File
	order []string
}

// keptNamespaces limits the cached descriptors.
const keptNamespaces = 64

// userns returns a user namespace with the map. Callers must not close it: an evicted one is
// closed when its last user drops it.
func (m IDMap) userns() (*os.File, error) {
	if err := errors.Join(checkRanges("users", m.UIDs), checkRanges("groups", m.GIDs)); err != nil {
		return nil, err
	}
	uids, gids := lines(m.UIDs), lines(m.GIDs)
	key := uids + "/" + gids
	n := &userNamespaces
	n.Lock()
	defer n.Unlock()
	if ns, ok := n.m[key]; ok {
		return ns, nil
	}
	ns, err := linux.NewUserns(uids, gids)
	if err != nil {
		return nil, fmt.Errorf("user namespace for an id map: %w", err)
	}
	if n.m == nil {
		n.m = map[string]*os.File{}
	}
	if len(n.order) == keptNamespaces {
		delete(n.m, n.order[0])
		n.order = n.order[1:]
	}
	n.m[key] = ns
	n.order = append(n.order, key)
	return ns, nil
}
