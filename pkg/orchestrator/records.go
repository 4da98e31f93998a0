package orchestrator

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/keylock"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Deferral is a pod's volume that was left to the pod's runtime.
type Deferral struct {
	Pod         PodKey   `json:"pod"`
	VolumeID    string   `json:"volumeID"`
	Volume      string   `json:"volume"` // the PersistentVolume's name
	Target      string   `json:"target"`
	Socket      string   `json:"socket"` // of the runtime
	Filesystems []string `json:"filesystems"`
	// HostKernel: the runtime's sandboxes use this node's kernel.
	HostKernel bool `json:"hostKernel,omitempty"`
	// The driver's answer.
	Source  string            `json:"source"`
	Type    string            `json:"type"`
	Options map[string]string `json:"options,omitempty"`
	// What the pod asks for.
	Group       *uint32 `json:"group,omitempty"`
	GroupPolicy string  `json:"groupPolicy,omitempty"`
	// SubPaths has the subPath of each mount, by CONTAINER/INDEX, as in the kubelet's path volume-subpaths/VOLUME/CONTAINER/INDEX.
	SubPaths map[string]string `json:"subPaths,omitempty"`
	// Sandbox in which it is published, or was tried; empty before.
	Sandbox   string `json:"sandbox,omitempty"`
	Published bool   `json:"published,omitempty"`
	BootID    string `json:"bootID"`
	// Trace is the W3C traceparent of the call that deferred the volume, empty if tracing is off.
	// It is removed when the volume is published: versions without the field refuse a record that
	// has it.
	Trace string `json:"trace,omitempty"`
}

// in tells whether it is published in a sandbox.
func (d Deferral) in(sandbox string) bool { return d.Published && d.Sandbox == sandbox }

// PodKey names a pod.
type PodKey struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

var deferralType = record.Type{Kind: "crust.deferral", Version: 1}

// Records stores deferrals on disk: the agent may end between any two steps.
type Records struct {
	dir   record.Dir[Deferral]
	boot  string
	write keylock.Locks[string] // by target: a write that hangs blocks no other
	mu    sync.Mutex            // guards what follows; never held while waiting for the disk
	m     map[string]Deferral   // by target
	bad   map[string]error      // unusable records, by path
}

// LoadRecords loads the records in a directory. It removes those of an earlier boot, which no
// sandbox outlives. An unreadable one stays (see Unusable). One of a newer version is an error.
func LoadRecords(dir, boot string) (*Records, error) {
	r := &Records{boot: boot, m: map[string]Deferral{}, bad: map[string]error{},
		dir: record.Dir[Deferral]{Path: dir, Type: deferralType, Name: func(d Deferral) string { return record.Name(d.Target) }}}
	var errs []error
	err := r.dir.Load(func(path string, d Deferral, err error) error {
		switch {
		case fault.Is(err, fault.State): // of a newer version
			errs = append(errs, err)
		case err != nil && !errors.Is(err, record.ErrMisplaced):
			r.bad[path] = record.Unusable(err)
		case d.BootID != boot:
			errs = append(errs, record.Remove(path))
		case err != nil:
			r.bad[path] = record.Unusable(err)
		default:
			r.m[d.Target] = d
		}
		return nil
	})
	return r, errors.Join(append(errs, err)...)
}

func (r *Records) path(target string) string { return r.dir.File(record.Name(target)) }

// Unusable returns the error for a target whose record is unusable, and nil for any other.
func (r *Records) Unusable(target string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.bad[r.path(target)]; err != nil {
		return fmt.Errorf("the volume at %s was left to the pod's sandbox: %w; or end the pod", target, err)
	}
	return nil
}

// Bad lists the errors of unusable records.
func (r *Records) Bad() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.bad))
}

// Get returns the deferral at a target.
func (r *Records) Get(target string) (Deferral, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d, ok := r.m[target]
	return d, ok
}

// Of lists the deferrals of a pod, given its uid.
func (r *Records) Of(uid string) []Deferral {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Deferral
	for _, d := range r.m {
		if d.Pod.UID == uid {
			list = append(list, d)
		}
	}
	slices.SortFunc(list, func(a, b Deferral) int { return strings.Compare(a.Target, b.Target) })
	return list
}

// All lists all deferrals.
func (r *Records) All() []Deferral {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.m))
}

// Put stores a deferral, on disk first. It keeps the sandbox that Place set.
func (r *Records) Put(d Deferral) error {
	defer r.write.Lock(d.Target)()
	have, ok := r.Get(d.Target)
	if have.Sandbox != "" && have.Source != d.Source {
		// Only by its name of then does the runtime find the volume that has to be released.
		return fmt.Errorf("the driver says that it is %s now, and sandbox %s may have it as %s: end the pod", d.Source, have.Sandbox, have.Source)
	}
	d.Sandbox, d.Published, d.BootID = have.Sandbox, have.Published, r.boot
	if d.Published {
		d.Trace = "" // the caller may have an older copy
	}
	if ok && reflect.DeepEqual(have, d) {
		return nil
	}
	return r.keep(d)
}

func (r *Records) keep(d Deferral) error {
	err := deferralType.Write(r.path(d.Target), d)
	if err != nil {
		// The record may be there all the same, as when its directory could not be synced. A change of an earlier one is repeated. But
		// the caller undoes a new one, so the next start must not find it. If it stays, it is in force from now on: then an unpublish
		// ends it.
		if _, ok := r.Get(d.Target); ok {
			return err
		}
		rerr := record.RemoveVolatile(r.path(d.Target))
		if err = errors.Join(err, rerr); rerr == nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m[d.Target] = d
	return err
}

// errEnded: nobody wants the volume published any more.
var errEnded = errors.New("its pod has ended, or is ending")

// Place records the sandbox in which a deferral is published, or about to be.
func (r *Records) Place(target, sandbox string, published bool) error {
	defer r.write.Lock(target)()
	d, ok := r.Get(target)
	switch {
	case !ok:
		return errEnded
	case d.Sandbox == sandbox && (d.Published || !published):
		return nil
	}
	d.Sandbox, d.Published = sandbox, published
	if published {
		d.Trace = ""
	}
	return r.keep(d)
}

// Remove forgets the deferral at a target.
func (r *Records) Remove(target string) error {
	defer r.write.Lock(target)()
	remove := record.Remove
	if r.Unusable(target) != nil {
		remove = record.SetAside
	}
	if err := remove(r.path(target)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.bad, r.path(target))
	delete(r.m, target)
	return nil
}
