// Package static finds volumes that somebody else made: a block device that
// the node's administrator allows, or an NFS share. What was learnt of such a
// volume (above all, that it was formatted) is kept in the state directory.
package static

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
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
)

type entry struct {
	Volume volume.Volume `json:"volume"`
	Device string        `json:"device,omitempty"`
	Server string        `json:"server,omitempty"`
	Share  string        `json:"share,omitempty"`
}

var entryType = record.Type{Kind: "crust-csi.static-volume", Version: 1}

// Source is the static source of one node.
type Source struct {
	dir     string
	allow   []string
	claimed func(mounter.Device) (string, bool)
	loop    loopdev.Nodes
	raw     rawdevice.Guard

	mu       sync.Mutex
	volumes  map[string]entry
	attached map[string]mounter.Device
	changed  map[string]string // what pods changed of their devices

	bad map[string]error // of records that cannot be used, by path; never changed after Open
}

var _ volume.StaticSource = (*Source)(nil)

// Options of Open.
type Options struct {
	Dir      string       // where records are kept
	Allow    []string     // globs of device paths that volumes may name
	NodesDir string       // for device nodes that /dev lacks
	Log      *slog.Logger // of records that cannot be used; nil for nobody
	// Claimed gives the volume of a pool that a device belongs to.
	Claimed func(mounter.Device) (id string, ok bool)
}

// Open reads the records.
func Open(o Options) (*Source, error) {
	for _, glob := range o.Allow {
		if _, err := filepath.Match(glob, ""); err != nil || !filepath.IsAbs(glob) {
			return nil, fault.New(fault.Invalid, "--allow-device %q is no absolute path or pattern", glob)
		}
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	s := &Source{
		dir: o.Dir, allow: o.Allow, claimed: o.Claimed, loop: loopdev.Nodes{Dir: o.NodesDir}, raw: rawdevice.Guard{Loops: loopdev.Nodes{Dir: o.NodesDir}},
		volumes: map[string]entry{}, attached: map[string]mounter.Device{}, changed: map[string]string{}, bad: map[string]error{},
	}
	names, err := record.Names(o.Dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		var e entry
		path := filepath.Join(o.Dir, name+record.Extension)
		err := entryType.Read(path, &e)
		if err == nil && s.path(e.Volume.ID) != path {
			err = fmt.Errorf("%s: the record is of volume %q, and does not belong there", path, e.Volume.ID)
		}
		if err != nil {
			s.bad[path] = record.Unusable(err)
			if o.Log != nil {
				o.Log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", s.bad[path])
			}
			continue
		}
		s.volumes[e.Volume.ID] = e
	}
	return s, nil
}

func (s *Source) path(id string) string {
	sum := sha256.Sum256([]byte(id))
	return filepath.Join(s.dir, hex.EncodeToString(sum[:16])+record.Extension)
}

// Claims tells whether the attributes describe a static volume.
func (s *Source) Claims(attributes map[string]string) bool {
	for _, k := range []string{AttrDevice, AttrServer, AttrShare} {
		if _, ok := attributes[k]; ok {
			return true
		}
	}
	return false
}

// Adopt takes a volume as its attributes describe it.
func (s *Source) Adopt(id string, attributes map[string]string) (volume.Volume, error) {
	e := entry{Device: attributes[AttrDevice], Server: attributes[AttrServer], Share: attributes[AttrShare]}
	switch {
	case e.Device != "" && (e.Server != "" || e.Share != ""):
		return volume.Volume{}, fault.New(fault.Invalid, "volume %s: the attribute %q excludes %q and %q", id, AttrDevice, AttrServer, AttrShare)
	case e.Device == "" && (e.Server == "" || e.Share == ""):
		return volume.Volume{}, fault.New(fault.Invalid, "volume %s: give the attribute %q, or both %q and %q", id, AttrDevice, AttrServer, AttrShare)
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
			return volume.Volume{}, fault.New(fault.Invalid, "volume %s was %s and is now asked for as %s: an id stands for one volume; use another volumeHandle", id, known, e)
		}
		return known.Volume, nil
	}
	if e.Device != "" {
		if _, err := s.resolve(id, e.Device); err != nil {
			return volume.Volume{}, err
		}
	}
	e.Volume = volume.Volume{ID: id, Created: time.Now().UTC(), Share: e.Device == ""}
	return e.Volume, s.save(e)
}

func checkShare(id string, e entry) error {
	if strings.ContainsAny(e.Server, "/,= \t\n\x00") || strings.HasPrefix(e.Server, "-") {
		return fault.New(fault.Invalid, "volume %s: server %q is no host name or address", id, e.Server)
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
		return err
	}
	s.mu.Lock()
	s.volumes[e.Volume.ID] = e
	s.mu.Unlock()
	return nil
}

// resolve finds the allowed block device that the attribute names.
func (s *Source) resolve(id, attr string) (mounter.Device, error) {
	path := filepath.Clean(attr)
	if !s.allowed(path) {
		return mounter.Device{}, fault.New(fault.Invalid, "volume %s: device %q is not among those that --allow-device permits on this node (%s)", id, attr, strings.Join(s.allow, ", "))
	}
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return mounter.Device{}, fault.New(fault.State, "volume %s: device %s does not exist on this node", id, attr)
	}
	if err != nil {
		return mounter.Device{}, err
	}
	d, err := mounter.FindDevice(real)
	if err != nil {
		return mounter.Device{}, fmt.Errorf("volume %s: %w", id, err)
	}
	if other, ok := s.claimed(rawdevice.Below(d)); ok {
		return mounter.Device{}, fault.New(fault.Invalid, "volume %s: %s belongs to the pool volume %s", id, real, other)
	}
	return d, nil
}

func (s *Source) allowed(path string) bool {
	for _, glob := range s.allow {
		if ok, err := filepath.Match(glob, path); err == nil && ok {
			return true
		}
	}
	return false
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

// Get gives a volume that was adopted.
func (s *Source) Get(id string) (volume.Volume, error) {
	e, err := s.find(id)
	return e.Volume, err
}

// List gives the volumes that were adopted.
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

// Attach finds the device again; two volumes cannot have one device.
func (s *Source) Attach(_ context.Context, id string) (volume.Attachment, error) {
	e, err := s.find(id)
	if err != nil {
		return volume.Attachment{}, err
	}
	if e.Device == "" {
		return volume.Attachment{Share: &volume.Share{Type: "nfs", Source: e.source()}}, nil
	}
	d, err := s.resolve(id, e.Device)
	if err != nil {
		return volume.Attachment{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for other, o := range s.attached {
		if other != id && o.Major == d.Major && o.Minor == d.Minor {
			return volume.Attachment{}, fault.New(fault.State, "volume %s: device %s is staged as volume %s", id, d.Path, other)
		}
	}
	s.attached[id] = d
	return volume.Attachment{Device: d}, nil
}

// Attached gives the device, if it is still the one that was attached.
func (s *Source) Attached(id string) (volume.Attachment, bool, error) {
	e, err := s.find(id)
	if err != nil {
		return volume.Attachment{}, false, err
	}
	if e.Device == "" {
		return volume.Attachment{Share: &volume.Share{Type: "nfs", Source: e.source()}}, true, nil
	}
	s.mu.Lock()
	known, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		a, err := s.Attach(context.Background(), id)
		return a, err == nil, err
	}
	now, err := mounter.FindDevice(known.Path)
	if err != nil {
		return volume.Attachment{}, false, fault.New(fault.State, "volume %s: its device %s is gone: %w", id, known.Path, err)
	}
	if now.Major != known.Major || now.Minor != known.Minor {
		return volume.Attachment{}, false, fault.New(fault.State, "volume %s: %s is now another device (%d:%d, was %d:%d); unstage and stage it again", id, known.Path, now.Major, now.Minor, known.Major, known.Minor)
	}
	return volume.Attachment{Device: now}, true, nil
}

// Remember takes up a device that an earlier process attached, whether or not
// its path leads to it still.
func (s *Source) Remember(id string, d mounter.Device) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached[id] = d
}

// Owns gives the volume that the device, or the one below a read-only loop
// device, belongs to.
func (s *Source) Owns(d mounter.Device) (string, bool) {
	if id, ok := s.attachedAs(d.Same); ok {
		return id, true
	}
	major, minor, ok := s.loop.Below(d.Major, d.Minor)
	if !ok {
		return "", false
	}
	return s.attachedAs(mounter.Device{Major: major, Minor: minor}.Same)
}

func (s *Source) attachedAs(is func(mounter.Device) bool) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, o := range s.attached {
		if is(o) {
			return id, true
		}
	}
	return "", false
}

// Detach releases what Attach and AttachReadOnly made. The device itself
// stays; it must not be mounted anywhere.
func (s *Source) Detach(ctx context.Context, id string) error {
	s.mu.Lock()
	d, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	if err := s.DetachReadOnly(ctx, id, nil); err != nil {
		return err
	}
	if err := s.release(d); err != nil {
		return fault.New(fault.State, "volume %s: %w", id, err)
	}
	busy, err := d.Held(s.loop.Dir)
	if err != nil {
		return err
	}
	if busy {
		return fault.New(fault.State, "volume %s: %s is in use%s", id, d.Path, mounter.HeldBy(d))
	}
	s.mu.Lock()
	delete(s.attached, id)
	delete(s.changed, id)
	s.mu.Unlock()
	return nil
}

// Refresh does nothing: a device has the size that it has.
func (s *Source) Refresh(context.Context, string) error { return nil }

// SetFacts keeps the facts in the state directory.
func (s *Source) SetFacts(id string, facts volume.Facts) error {
	e, err := s.find(id)
	if err != nil {
		return err
	}
	e.Volume.Facts = facts
	return s.save(e)
}
