// Package static provides volumes that somebody else made: a block device that the node's
// administrator allows, or an NFS share. It stores what it learns of such a volume (above all,
// that it was formatted) in the state directory.
package static

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// The attributes that describe a static volume.
const (
	AttrDevice = "device"
	AttrServer = "server"
	AttrShare  = "share"
	// AttrFormat selects when a device may be formatted: one of FormatWords.
	AttrFormat = "format"
)

// The values of AttrFormat.
const (
	// IfProvenBlank formats if every byte is zero. It is the default.
	IfProvenBlank = "IfProvenBlank"
	// IfProbedBlank formats if there is nothing at the places where formats have their
	// signatures and the copies of those. The administrator thereby declares that data
	// elsewhere may be lost.
	IfProbedBlank = "IfProbedBlank"
)

// FormatWords returns the values of AttrFormat, the default first.
func FormatWords() []string { return []string{IfProvenBlank, IfProbedBlank} }

// entry is a volume's record. Version 2 added Format and Identity.
type entry struct {
	Volume volume.Volume `json:"volume"`
	Device string        `json:"device,omitempty"`
	Server string        `json:"server,omitempty"`
	Share  string        `json:"share,omitempty"`
	Format string        `json:"format,omitempty"` // empty: IfProvenBlank
	// Identity is that of the device found last. It is unknown in a record of version 1 until
	// the device is found.
	Identity mounter.Identity `json:"identity"`
}

var entryType = record.Type{Kind: "crust-csi.static-volume", Version: 2}

// Source is the static source of one node.
type Source struct {
	dir     record.Dir[entry]
	known   record.Dir[deviceRecord] // by identity
	read    record.Dir[readRecord]   // by identity
	allow   atomic.Pointer[[]string]
	claimed func(mounter.Device) (string, bool, error)
	loop    loopdev.Nodes
	raw     rawdevice.Guard
	toAllow string
	log     *slog.Logger
	boot    string

	mu       sync.Mutex
	volumes  map[string]entry
	attached map[string]claim
	devices  map[string]deviceRecord // by key of their identity
	changed  map[string]string       // what pods changed on their devices, by volume

	bad map[string]error // unusable records, by path; not changed after Open
}

var (
	_ volume.StaticSource = (*Source)(nil)
	_ volume.Prover       = (*Source)(nil)
)

// Options are the options of Open.
type Options struct {
	Dir      string       // the directory of the records
	Allow    []string     // globs of the device paths that volumes may name
	ToAllow  string       // how an administrator allows a device; appended to refusals
	NodesDir string       // for device nodes that /dev lacks
	Log      *slog.Logger // nil: no log
	// Claimed returns the pool volume to which a device belongs, or an error if it cannot tell. nil:
	// there are no pools.
	Claimed func(mounter.Device) (id string, ok bool, err error)
}

// Open reads the records and returns the source.
func Open(o Options) (*Source, error) {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Claimed == nil {
		o.Claimed = func(mounter.Device) (string, bool, error) { return "", false, nil }
	}
	boot, err := mounter.BootID()
	if err != nil {
		return nil, err
	}
	s := &Source{
		toAllow: o.ToAllow, claimed: o.Claimed, log: o.Log, boot: boot,
		loop: loopdev.Nodes{Dir: o.NodesDir}, raw: rawdevice.Guard{Loops: loopdev.Nodes{Dir: o.NodesDir}},
		volumes: map[string]entry{}, attached: map[string]claim{}, devices: map[string]deviceRecord{},
		changed: map[string]string{}, bad: map[string]error{},
	}
	s.keepIn(o.Dir)
	if err := s.Allow(o.Allow); err != nil {
		return nil, err
	}
	err = s.dir.Load(func(path string, e entry, err error) error {
		if err != nil {
			s.unusable(path, err)
		} else {
			s.volumes[e.Volume.ID] = e
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s, s.loadDevices()
}

// keepIn sets the directories of the records.
func (s *Source) keepIn(dir string) {
	s.dir = record.Dir[entry]{Path: dir, Type: entryType, Name: func(e entry) string { return record.Name(e.Volume.ID) }}
	s.known = record.Dir[deviceRecord]{Path: filepath.Join(dir, "devices"), Type: deviceType,
		Name: func(r deviceRecord) string { return keyOf(r.Identity) }}
	s.read = record.Dir[readRecord]{Path: filepath.Join(dir, "reads"), Type: readType}
}

// Allow replaces the globs of the devices that volumes may name. A staged volume keeps its
// device. A glob that is malformed or not absolute is a fault.Invalid.
func (s *Source) Allow(globs []string) error {
	for _, glob := range globs {
		if err := mounter.Pattern(glob).Check(); err != nil {
			return fmt.Errorf("device %w", err)
		}
	}
	globs = slices.Clone(globs)
	s.allow.Store(&globs)
	return nil
}

// unusable remembers an unusable record, so that it does not count as missing.
func (s *Source) unusable(path string, err error) {
	s.bad[path] = record.Unusable(err)
	s.log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", s.bad[path])
}

func (s *Source) path(id string) string { return s.dir.File(record.Name(id)) }

// Claims reports whether the attributes describe a static volume.
func (s *Source) Claims(attributes map[string]string) bool {
	for _, k := range []string{AttrDevice, AttrServer, AttrShare} {
		if _, ok := attributes[k]; ok {
			return true
		}
	}
	return false
}

// Attribute reports whether a key of the attributes is one for static volumes. AttrFormat is one of a device only.
func (s *Source) Attribute(attributes map[string]string, key string) (ok bool, err error) {
	switch key {
	case AttrDevice, AttrServer, AttrShare:
		return true, nil
	case AttrFormat:
		if attributes[AttrDevice] == "" {
			return false, nil
		}
		if !slices.Contains(FormatWords(), attributes[key]) {
			err = fault.New(fault.Invalid, "attribute %s=%q: the value must be one of %s", key, attributes[key],
				strings.Join(FormatWords(), ", "))
		}
		return true, err
	}
	return false, nil
}

// AttributeNames lists the keys of static volumes.
func (s *Source) AttributeNames() string {
	return fmt.Sprintf("%s (and with it %s), %s, %s", AttrDevice, AttrFormat, AttrServer, AttrShare)
}

// Shared reports whether the attributes describe a share.
func (s *Source) Shared(attributes map[string]string) bool {
	return s.Claims(attributes) && attributes[AttrDevice] == ""
}

// Adopt accepts a volume as its attributes describe it.
func (s *Source) Adopt(id string, attributes map[string]string) (volume.Volume, error) {
	e := entry{Device: attributes[AttrDevice], Server: attributes[AttrServer], Share: attributes[AttrShare], Format: attributes[AttrFormat]}
	switch {
	case e.Device != "" && (e.Server != "" || e.Share != ""):
		return volume.Volume{}, fault.New(fault.Invalid, "volume %s: the attribute %q excludes %q and %q",
			id, AttrDevice, AttrServer, AttrShare)
	case e.Device == "" && (e.Server == "" || e.Share == ""):
		return volume.Volume{}, fault.New(fault.Invalid, "volume %s: give the attribute %q, or both %q and %q", id, AttrDevice, AttrServer,
			AttrShare)
	case e.Device == "":
		if err := checkShare(id, e); err != nil {
			return volume.Volume{}, err
		}
	}
	if err := s.bad[s.path(id)]; err != nil {
		return volume.Volume{}, fmt.Errorf("volume %s: %w", id, err)
	}
	s.mu.Lock()
	known, ok := s.volumes[id]
	s.mu.Unlock()
	if ok {
		if known.Device != e.Device || known.Server != e.Server || known.Share != e.Share {
			return volume.Volume{}, fault.New(fault.Invalid,
				"volume %s was %s and is now asked for as %s: an id stands for one volume; use "+
					"another volumeHandle", id, known, e)
		}
		if known.Format == e.Format {
			return known.Volume, nil
		}
		s.log.Info("a static volume's attribute has changed", "volume_id", id, "attribute", AttrFormat, "was", known.Format, "is", e.Format)
		known.Format = e.Format
		return known.Volume, s.save(known)
	}
	if e.Device != "" {
		if _, err := s.resolve(id, e.Device); err != nil {
			return volume.Volume{}, err
		}
	}
	e.Volume = volume.Volume{ID: id, Created: time.Now().UTC(), Share: e.Device == ""}
	return e.Volume, s.save(e)
}

const maxSource = 255 // limit of fsconfig(2) for "server:/share"

func checkShare(id string, e entry) error {
	host := e.Server
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") { // an IPv6 address
		host = host[1 : len(host)-1]
	}
	if host == "" || strings.ContainsAny(host, "/,= \t\n\x00[]") || strings.HasPrefix(host, "-") {
		return fault.New(fault.Invalid, "volume %s: server %q is no host name or address", id, e.Server)
	}
	if len(e.source()) > maxSource {
		return fault.New(fault.Invalid, "volume %s: server and share have more than %d bytes together, which the kernel does not take", id,
			maxSource)
	}
	if !strings.HasPrefix(e.Share, "/") || strings.ContainsAny(e.Share, "\n\x00") {
		return fault.New(fault.Invalid, "volume %s: share %q is no absolute path", id, e.Share)
	}
	return nil
}

func (e entry) String() string {
	if e.Device != "" {
		return "device " + e.Device
	}
	return "share " + e.source()
}

func (e entry) source() string {
	if strings.Contains(e.Server, ":") && !strings.HasPrefix(e.Server, "[") {
		return "[" + e.Server + "]:" + e.Share
	}
	return e.Server + ":" + e.Share
}

func (s *Source) save(e entry) error {
	if err := entryType.Write(s.path(e.Volume.ID), e); err != nil {
		return volume.NotNoted(e.Volume.ID, "what it is", err)
	}
	s.mu.Lock()
	s.volumes[e.Volume.ID] = e
	s.mu.Unlock()
	return nil
}

// resolve returns the block device that the attribute names, if it is allowed.
func (s *Source) resolve(id, attr string) (mounter.Device, error) {
	path := filepath.Clean(attr)
	if !s.allowed(path) {
		return mounter.Device{}, fault.New(fault.Invalid,
			"volume %s: device %q is not among those that volumes of this node may name (%s)%s", id, attr,
			cmp.Or(strings.Join(*s.allow.Load(), ", "), "none"), s.toAllow)
	}
	d, err := mounter.FindNamed(path)
	if err != nil {
		return mounter.Device{}, fmt.Errorf("volume %s: %w", id, err)
	}
	below, err := rawdevice.Below(d)
	if err != nil {
		return mounter.Device{}, err
	}
	other, ok, err := s.claimed(below)
	if err != nil {
		return mounter.Device{}, fmt.Errorf("volume %s: whether a pool has %s: %w", id, d.Path, err)
	}
	if ok {
		return mounter.Device{}, fault.New(fault.Invalid, "volume %s: %s belongs to the pool volume %s", id, d.Path, other)
	}
	return d, nil
}

func (s *Source) allowed(path string) bool {
	return slices.ContainsFunc(*s.allow.Load(), func(glob string) bool {
		ok, _ := mounter.Pattern(glob).Matches(path)
		return ok
	})
}

func (s *Source) find(id string) (entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.volumes[id]
	if err := s.bad[s.path(id)]; err != nil {
		return entry{}, fmt.Errorf("volume %s: %w", id, err)
	}
	if !ok {
		return entry{}, fault.New(fault.NotFound, "volume %s is not known on this node", id)
	}
	return e, nil
}

// Get returns an adopted volume.
func (s *Source) Get(id string) (volume.Volume, error) {
	e, err := s.find(id)
	return e.Volume, err
}

// List returns the adopted volumes, by id.
func (s *Source) List() []volume.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]volume.Volume, 0, len(s.volumes))
	for _, e := range s.volumes {
		list = append(list, e.Volume)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].ID < list[j].ID })
	return list
}

// Refresh grows what pods have of the device to its size. The size of the device itself is not managed here.
func (s *Source) Refresh(_ context.Context, id string) error {
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	devices, err := s.readOnlyLoops(id)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if err := d.SetCapacity(); err != nil {
			return fmt.Errorf("volume %s: %s, which shows its device read-only: %w", id, d.Path, err)
		}
	}
	own, ok, err := s.loop.Open(c.device.Major, c.device.Minor)
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	if ok {
		devices = append(devices, own)
	}
	for _, d := range devices { // what is mapped over them
		if err := s.raw.Resize(d); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
	}
	return nil
}
