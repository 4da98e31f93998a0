package driver

import (
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// readOnlyAs says how a publish was made read-only.
type readOnlyAs string

const (
	writable  readOnlyAs = ""
	recursive readOnlyAs = "recursive"
	// plain: mounts below it would not be read-only. This was requested.
	plain readOnlyAs = "plain"
	// notRecursive is plain because the kernel lacks mount_setattr.
	notRecursive readOnlyAs = "plain-for-want-of-mount_setattr"
)

// shown has the facts of a publish that the kernel does not report.
type shown struct {
	ReadOnly readOnlyAs `json:"readOnly,omitempty"`
	Group    string     `json:"group,omitempty"` // that an id-mapped publish shows
	// asked is not on record: a publish by an earlier process may be repeated with any group.
	asked askedGroup
}

// askedGroup is the group that a publish asked for; empty: for none.
type askedGroup struct {
	known bool
	group string
}

// onRecord reports whether a record has anything of this.
func (s shown) onRecord() bool { return s.ReadOnly != writable || s.Group != "" }

// publishedRecord stores what one target shows. A reboot voids it.
type publishedRecord struct {
	VolumeID string `json:"volumeID"`
	BootID   string `json:"bootID"`
	Target   string `json:"target"`
	Shown    shown  `json:"shown"`
}

var publishedType = record.Type{Kind: "crust-csi.published", Version: 1}

// publishedTargets is an index of what the kernel knows: where volumes are mounted. It saves scans
// of the mount table; callers check the target before they act on an entry. What the kernel does
// not know is on record.
type publishedTargets struct {
	dir  record.Dir[publishedRecord]
	boot string
	log  *slog.Logger

	mu           sync.Mutex
	m            map[string]map[string]shown
	recorded     map[string]shown         // records of earlier processes, by path
	unidentified map[string]mounter.Mount // by target: mounts found at the start whose volume is not known yet
}

func loadPublished(dir, boot string, log *slog.Logger) (*publishedTargets, error) {
	p := &publishedTargets{boot: boot, log: log, m: map[string]map[string]shown{}, recorded: map[string]shown{},
		unidentified: map[string]mounter.Mount{}, dir: record.Dir[publishedRecord]{Path: dir, Type: publishedType,
			Name: func(r publishedRecord) string { return record.Name(r.VolumeID, r.Target) }}}
	return p, p.dir.Load(func(path string, r publishedRecord, err error) error {
		switch {
		case err != nil:
			// Torn by a power loss, or of a newer driver. Nothing is known of the target until it
			// is unpublished.
			log.Warn("it is not known how a volume was published", "file", path, "error", err)
		case r.BootID != boot:
			return record.RemoveVolatile(path)
		default:
			p.recorded[path] = r.Shown
		}
		return nil
	})
}

// addUnidentified remembers a mount whose volume is unknown.
func (p *publishedTargets) addUnidentified(m mounter.Mount) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unidentified[m.Path] = m
}

// unidentifiedMounts returns the mounts whose volume is unknown.
func (p *publishedTargets) unidentifiedMounts() []mounter.Mount {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Values(p.unidentified))
}

// attribute adds such a mount to the index as the volume's, unless it was unpublished meanwhile.
func (p *publishedTargets) attribute(id, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.unidentified[target]; !ok {
		return
	}
	delete(p.unidentified, target)
	if _, ok := p.m[id][target]; !ok {
		p.put(id, target, p.recorded[p.path(id, target)])
	}
}

// forgetMount forgets such a mount.
func (p *publishedTargets) forgetMount(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.unidentified, target)
}

func (p *publishedTargets) path(id, target string) string { return p.dir.File(record.Name(id, target)) }

// add adds a target, and keeps its facts.
func (p *publishedTargets) add(id, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.m[id][target]; !ok {
		p.put(id, target, p.recorded[p.path(id, target)])
	}
}

func (p *publishedTargets) put(id, target string, what shown) {
	if p.m[id] == nil {
		p.m[id] = map[string]shown{}
	}
	p.m[id][target] = what
}

// noted tells whether a target is in the index, or on record, as the volume's.
func (p *publishedTargets) noted(id, target string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, recorded := p.recorded[p.path(id, target)]
	_, ok := p.m[id][target]
	return ok || recorded
}

// recordedAs returns the one of these volumes that a record has at a target.
func (p *publishedTargets) recordedAs(ids []string, target string) (string, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []string
	for _, id := range ids {
		if _, ok := p.recorded[p.path(id, target)]; ok {
			found = append(found, id)
		}
	}
	if len(found) != 1 {
		return "", false
	}
	return found[0], true
}

// note adds a target that is about to be published, and records how. anonymous: the mount will not tell whose it is, so there is a record
// in any case.
func (p *publishedTargets) note(id, target string, what shown, anonymous bool) error {
	path := p.path(id, target)
	var err error
	if !what.onRecord() && !anonymous {
		err = record.RemoveVolatile(path)
	} else {
		err = publishedType.WriteVolatile(path, publishedRecord{id, p.boot, target, what})
	}
	if err != nil {
		return volume.NotNoted(id, "how it is published at "+target, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.recorded, path)
	delete(p.unidentified, target)
	p.put(id, target, what)
	return nil
}

func (p *publishedTargets) shown(id, target string) shown {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.m[id][target]
}

func (p *publishedTargets) remove(id, target string) error {
	path := p.path(id, target)
	if err := record.RemoveVolatile(path); err != nil {
		return volume.NotNoted(id, "that it is unpublished at "+target, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.recorded, path)
	delete(p.unidentified, target)
	delete(p.m[id], target)
	if len(p.m[id]) == 0 {
		delete(p.m, id)
	}
	return nil
}

// forget drops a target that the kernel refutes from the index. Its record stays until it is
// unpublished.
func (p *publishedTargets) forget(id, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if what, ok := p.m[id][target]; ok && what.onRecord() {
		p.recorded[p.path(id, target)] = what
	}
	delete(p.m[id], target)
	if len(p.m[id]) == 0 {
		delete(p.m, id)
	}
}

func (p *publishedTargets) of(id string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return sortedKeys(p.m[id])
}
