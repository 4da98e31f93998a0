package sandbox

import (
	"errors"
	"maps"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// sandboxRecord records a registered sandbox.
type sandboxRecord struct {
	Kind    string                  `json:"kind"` // of the backend
	Spec    Spec                    `json:"spec"`
	BootID  string                  `json:"bootID"`
	Process process                 `json:"process"`
	Volumes map[string]volumeRecord `json:"volumes,omitempty"` // by device path
}

// Short names for this package.
const (
	publishing = crust.StatePublishing
	pending    = crust.StatePending
	published  = crust.StatePublished
)

// volumeRecord is written before a volume is touched, and again when it is mounted.
type volumeRecord struct {
	State    string           `json:"state"`
	Device   mounter.Device   `json:"device"`
	Target   string           `json:"target"`
	Type     string           `json:"type"`
	Options  []string         `json:"options,omitempty"`
	ReadOnly bool             `json:"readOnly,omitempty"`
	Group    *uint32          `json:"group,omitempty"`
	Policy   ownership.Policy `json:"policy,omitempty"`
	Place    Place            `json:"place"`
}

func (r volumeRecord) volume() (Volume, error) {
	o, err := mounter.ParseOptions(r.Options)
	return Volume{Device: r.Device, Target: r.Target, Type: r.Type, Options: o, ReadOnly: r.ReadOnly, Group: r.Group, Policy: r.Policy}, err
}

var sandboxType = record.Type{Kind: "crust.sandbox", Version: 1}

// store keeps the records of sandboxes.
type store struct{ record.Dir[sandboxRecord] }

func newStore(dir string) store {
	return store{record.Dir[sandboxRecord]{Path: dir, Type: sandboxType,
		Name: func(r sandboxRecord) string { return record.Name(r.Spec.ID) }}}
}

func (s store) path(id string) string     { return s.File(record.Name(id)) }
func (s store) put(r sandboxRecord) error { return sandboxType.Write(s.path(r.Spec.ID), r) }
func (s store) remove(id string) error    { return record.Remove(s.path(id)) }

// add makes the record of a new sandbox. If that fails, the record may be there all the same, as when its directory could not be synced. No
// caller learns of this sandbox, so the next start must not find it.
func (s store) add(r sandboxRecord) error {
	err := s.put(r)
	if err != nil {
		err = errors.Join(err, record.RemoveVolatile(s.path(r.Spec.ID)))
	}
	return err
}

// change replaces a sandbox's record, and returns the one that this process goes on from. If that fails, a volume that was added may be on
// disk all the same. Then this process has it, too: an unpublish of a volume that only the disk knows would leave it there. Other changes
// are repeated.
func (s store) change(from, to sandboxRecord) (sandboxRecord, error) {
	err := s.put(to)
	if err == nil {
		return to, nil
	}
	var is sandboxRecord
	if rerr := sandboxType.Read(s.path(to.Spec.ID), &is); rerr != nil {
		return from, errors.Join(err, rerr)
	}
	if is.Volumes != nil {
		maps.Copy(is.Volumes, from.Volumes)
		from.Volumes = is.Volumes
	}
	return from, err
}

// load returns all sandboxes, including those of earlier boots. bad has the unusable records by
// path.
func (s store) load() (list []sandboxRecord, bad map[string]error, err error) {
	bad = map[string]error{}
	err = s.Load(func(path string, r sandboxRecord, err error) error {
		if err != nil {
			bad[path] = record.Unusable(err)
		} else {
			list = append(list, r)
		}
		return nil
	})
	return list, bad, err
}
