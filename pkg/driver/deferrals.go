package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// deferral says that a pod's runtime mounts a volume, not this node (KEP-2857). It is written
// before the orchestrator is told, and removed after the placeholder. While it exists, nothing on
// this node mounts, checks or grows the volume. A reboot ends every sandbox, and so the deferral.
type deferral struct {
	VolumeID string            `json:"volumeID"`
	BootID   string            `json:"bootID"`
	Target   string            `json:"target"`
	Source   string            `json:"source"` // the device, or server:/share
	Type     string            `json:"type"`
	Options  map[string]string `json:"options,omitempty"`

	bad error // unusable record: only volume and target are known
}

// A newer version is refused at start: a driver that does not understand a deferral must not touch
// the volume.
var deferralType = record.Type{Kind: "crust-csi.deferral", Version: 1}

// deferrals has several of a volume only if all sandboxes read.
type deferrals struct {
	dir, boot string
	mu        sync.Mutex
	m         map[string]map[string]deferral // by volume and target
	bad       map[string]error               // unusable records, by path
}

func loadDeferrals(dir, boot string) (*deferrals, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	d := &deferrals{dir: dir, boot: boot, m: map[string]map[string]deferral{}, bad: map[string]error{}}
	names, err := record.Names(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		path := filepath.Join(dir, name+record.Extension)
		var r deferral
		switch err := deferralType.Read(path, &r); {
		case fault.Is(err, fault.State), record.Untold(err): // of a newer version, or this process lacks what it needs to read any
			return nil, fmt.Errorf("a deferred volume: %w", err)
		case err != nil:
			d.bad[path] = record.Unusable(err)
			continue
		}
		if r.BootID == boot {
			d.remember(r)
			if path == d.path(r) {
				continue
			}
			// An older driver kept one per volume, under another name.
			if err := deferralType.Write(d.path(r), r); err != nil {
				return nil, err
			}
		}
		if err := record.Remove(path); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (d *deferrals) path(r deferral) string {
	sum := sha256.Sum256([]byte(r.VolumeID + "\x00" + r.Target))
	return filepath.Join(d.dir, hex.EncodeToString(sum[:16])+record.Extension)
}

func (d *deferrals) remember(r deferral) {
	if d.m[r.VolumeID] == nil {
		d.m[r.VolumeID] = map[string]deferral{}
	}
	d.m[r.VolumeID][r.Target] = r
}

// of returns a volume's deferrals, by target.
func (d *deferrals) of(id string) []deferral {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Values(d.m[id]), func(a, b deferral) int { return strings.Compare(a.Target, b.Target) })
}

func (d *deferrals) at(id, target string) (deferral, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, ok := d.m[id][target]
	return r, ok
}

func (d *deferrals) put(r deferral) error {
	r.BootID = d.boot
	if err := deferralType.Write(d.path(r), r); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remember(r)
	return nil
}

func (d *deferrals) remove(r deferral) error {
	remove := record.Remove
	if r.bad != nil {
		remove = record.SetAside
	}
	if err := remove(d.path(r)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.m[r.VolumeID], r.Target)
	if len(d.m[r.VolumeID]) == 0 {
		delete(d.m, r.VolumeID)
	}
	return nil
}

func (r deferral) readOnly() bool {
	_, ok := r.Options["ro"]
	return ok
}

func targetsOf(all []deferral) string {
	var at []string
	for _, r := range all {
		at = append(at, r.Target)
	}
	return strings.Join(at, ", ")
}
