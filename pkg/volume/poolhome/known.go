package poolhome

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// known is the node's record of a pool.
type known struct {
	ID  string `json:"id"`
	Dir string `json:"dir"`
}

// Known returns the directories of the current and former pools of a node, by name: see
// Options.State. The error joins those of unreadable records.
func Known(state string) (dirs map[string]string, err error) {
	names, err := record.Names(state)
	dirs = map[string]string{}
	for _, name := range names {
		k, rerr := readKnown(state, name)
		if rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		dirs[name] = k.Dir
	}
	return dirs, err
}

func readKnown(state, name string) (k known, err error) {
	return k, knownType.Read(recordOf(state, name), &k)
}

func recordOf(state, name string) string { return filepath.Join(state, name+record.Extension) }

// Former is a pool of a node that is not configured any more.
type Former struct {
	Name   string
	Record string // the file by which the node knows of it
	Dir    string
	Err    error // why Dir is unknown
	id     string
}

// Here returns an error if the pool is not at its directory, or if that cannot be told: its disk may not be mounted. It may hang with the
// disk.
func (f Former) Here() error {
	if f.Err != nil {
		return f.Err
	}
	i, err := readFrom(f.Dir)
	if err != nil {
		return fmt.Errorf("whether the pool is at %s: %w", f.Dir, err)
	}
	if i.ID != f.id {
		return fault.New(fault.Unavailable, "%s is the directory of another pool", f.Dir)
	}
	return nil
}

// FormerPools returns the pools of a node that are not among those configured, by name: see Options.State. A pool that only got another
// name is none.
func FormerPools(state string, configured []string) (former []Former, err error) {
	names, err := record.Names(state)
	if err != nil {
		return nil, err
	}
	present := map[string]bool{}
	for _, name := range configured {
		if k, err := readKnown(state, name); err == nil { // otherwise the pool tells
			present[k.ID] = true
		}
	}
	for _, name := range names {
		k, err := readKnown(state, name)
		if !slices.Contains(configured, name) && (err != nil || !present[k.ID]) {
			former = append(former, Former{Name: name, Record: recordOf(state, name), Dir: k.Dir, Err: err, id: k.ID})
		}
	}
	return former, nil
}

// SameVolume reports whether two ids are those of one volume, whose pool got another name: both names have one identity. See Options.State.
// A record that cannot be read is an error, and one that is missing is no identity. It does not look at the pool.
func SameVolume(state, id, other string) (bool, error) {
	a, key, _, ok := volume.ParseID(id)
	b, otherKey, _, otherOK := volume.ParseID(other)
	if !ok || !otherOK || key != otherKey {
		return false, nil
	}
	var is [2]known
	for i, name := range []string{a, b} {
		var err error
		if is[i], err = readKnown(state, name); errors.Is(err, fs.ErrNotExist) {
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	return is[0].ID != "" && is[0].ID == is[1].ID, nil
}
