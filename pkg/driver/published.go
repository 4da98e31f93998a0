package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/crust-csi/crust-csi/internal/record"
)

// readOnlyAs says how a read-only publish was made so.
type readOnlyAs string

const (
	writable  readOnlyAs = ""
	recursive readOnlyAs = "recursive"
	// plain: mounts below it would not be read-only. It was asked for so.
	plain readOnlyAs = "plain"
	// notRecursive is plain because the kernel cannot do better.
	notRecursive readOnlyAs = "plain-for-want-of-mount_setattr"
)

// shown is what is known of a publish beyond what the kernel tells.
type shown struct {
	ReadOnly readOnlyAs `json:"readOnly,omitempty"`
	Group    string     `json:"group,omitempty"` // that an id-mapped publish shows
}

// publishedRecord keeps what is shown at one target. A reboot makes it void.
type publishedRecord struct {
	VolumeID string `json:"volumeID"`
	BootID   string `json:"bootID"`
	Target   string `json:"target"`
	Shown    shown  `json:"shown"`
}

var publishedType = record.Type{Kind: "crust-csi.published", Version: 1}

// publishedTargets is an index of what the kernel knows: where volumes are
// mounted. It saves looking through the mount table; whoever acts on an entry
// looks at the target first. What the kernel does not know is on record.
type publishedTargets struct {
	dir, boot string
	log       *slog.Logger

	mu       sync.Mutex
	m        map[string]map[string]shown
	recorded map[string]shown // by path of the record: of earlier processes
}

func loadPublished(dir, boot string, log *slog.Logger) (*publishedTargets, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	p := &publishedTargets{dir: dir, boot: boot, log: log, m: map[string]map[string]shown{}, recorded: map[string]shown{}}
	names, err := record.Names(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		path := filepath.Join(dir, name+record.Extension)
		var r publishedRecord
		err := publishedType.Read(path, &r)
		if err == nil && p.path(r.VolumeID, r.Target) != path {
			err = fmt.Errorf("%s: the record is of volume %q at %s, and does not belong there", path, r.VolumeID, r.Target)
		}
		switch {
		case err != nil:
			// Torn by a power loss, or of a newer driver. The target is treated as
			// one of which nothing is known, until it is unpublished.
			log.Warn("it is not known how a volume was published", "file", path, "error", err)
		case r.BootID != boot:
			if err := record.RemoveVolatile(path); err != nil {
				return nil, err
			}
		default:
			p.recorded[path] = r.Shown
		}
	}
	return p, nil
}

func (p *publishedTargets) path(id, target string) string {
	sum := sha256.Sum256([]byte(id + "\x00" + target))
	return filepath.Join(p.dir, hex.EncodeToString(sum[:16])+record.Extension)
}

// add takes a target; what is known of it is kept.
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

// note takes a target that is about to be published, and records how.
func (p *publishedTargets) note(id, target string, what shown) error {
	path := p.path(id, target)
	var err error
	if what == (shown{}) {
		err = record.RemoveVolatile(path)
	} else {
		err = publishedType.WriteVolatile(path, publishedRecord{id, p.boot, target, what})
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.recorded, path)
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
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.recorded, path)
	delete(p.m[id], target)
	if len(p.m[id]) == 0 {
		delete(p.m, id)
	}
	return nil
}

// forget takes a target out of the index that the kernel does not confirm. Its
// record stays until it is unpublished.
func (p *publishedTargets) forget(id, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if what, ok := p.m[id][target]; ok && what != (shown{}) {
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
