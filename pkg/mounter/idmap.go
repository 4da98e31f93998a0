package mounter

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// IDRange is one line of a map: Count ids, from Disk in the file system's view
// and from Shown in that of processes.
type IDRange struct{ Disk, Shown, Count uint32 }

// IDMap is how an idmapped mount shows the ids that are on disk,
// mount_setattr(2). Ids in no range show as the overflow id and cannot be
// used.
type IDMap struct{ UIDs, GIDs []IDRange }

const allIDs = 1<<32 - 1 // 4294967295 is no id

// ShowGroup is the map that shows the group disk as the group shown, and the
// other way round, for a map is one to one. Every other id is itself.
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

// Shift is the map of a user namespace: count ids from 0 on disk are shown
// from shown on.
func Shift(shown, count uint32) IDMap {
	r := []IDRange{{0, shown, count}}
	return IDMap{UIDs: r, GIDs: r}
}

func lines(ranges []IDRange) string {
	var b strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&b, "%d %d %d\n", r.Disk, r.Shown, r.Count)
	}
	return b.String()
}

// userNamespaces keeps the namespaces of maps that were used: making one costs
// a copy of this process.
var userNamespaces struct {
	sync.Mutex
	m     map[string]*os.File
	order []string
}

// keptNamespaces bounds the descriptors that are held.
const keptNamespaces = 64

// userns gives a user namespace of the map. Nobody closes it: one that is no
// longer kept is closed when its last user has let go of it.
func (m IDMap) userns() (*os.File, error) {
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
