package static

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// deviceRecord records what was done to a device, independently of the volume's id. Somebody
// chooses the id; a disk stays the same disk under another one.
type deviceRecord struct {
	Identity mounter.Identity `json:"identity"`
	Path     string           `json:"path"` // where it was found last
	Facts    volume.Facts     `json:"facts"`
	RawAs    string           `json:"rawAs,omitempty"` // the volume as which it was given out raw
}

var deviceType = record.Type{Kind: "crust-csi.static-device", Version: 1}

// readRecord records how far a device has been read to prove that it is blank.
type readRecord struct {
	Identity mounter.Identity `json:"identity"`
	BootID   string           `json:"bootID"`
	Read     superblock.Read  `json:"read"`
}

var readType = record.Type{Kind: "crust-csi.static-read", Version: 1}

func keyOf(i mounter.Identity) string {
	return record.Name(i.Kind, i.Value, fmt.Sprint(i.Start), fmt.Sprint(i.Length), i.Boot)
}

func (s *Source) devicePath(key string) string {
	return s.known.File(key)
}

func (s *Source) readPath(key string) string {
	return s.read.File(key)
}

func (s *Source) loadDevices() error {
	err := s.known.Load(func(path string, r deviceRecord, err error) error {
		if err != nil {
			s.unusable(path, err)
		} else {
			s.devices[keyOf(r.Identity)] = r
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.read.Load(func(path string, r readRecord, err error) error {
		if err == nil && r.BootID == s.boot {
			return nil
		}
		// Of an earlier boot, or torn by its end: what happened since is unknown.
		return record.RemoveVolatile(path)
	})
}

// learn combines the records of a volume and of the device found for it.
func (s *Source) learn(e entry, d mounter.Device, identity mounter.Identity) error {
	id := e.Volume.ID
	if e.Identity.Burnt() && identity.Burnt() && !e.Identity.SameDisk(identity) {
		return fault.New(fault.State, "volume %s was the disk %s, and %s is the disk %s now: "+
			"an id stands for one disk; use another volumeHandle for this one", id, e.Identity, d.Path, identity)
	}
	key := keyOf(identity)
	s.mu.Lock()
	was, known := s.devices[key]
	s.mu.Unlock()
	r := was
	r.Identity, r.Path = identity, d.Path
	if !e.Identity.Known() || e.Identity.SameDisk(identity) {
		r.Facts = union(r.Facts, e.Volume.Facts)
	}
	if r.Facts.GivenRaw && r.RawAs == "" {
		r.RawAs = id
	}
	if e.Identity != identity {
		unusable := s.bad[s.devicePath(key)] != nil && !e.Identity.Known() // an existing volume's own record tells
		r.Facts.GivenToGuest = r.Facts.GivenToGuest || unusable || s.guestMayHaveHad(d, identity, e.Identity.Known())
	}
	if !known || r != was {
		if err := s.saveDevice(id, key, r); err != nil {
			return err
		}
	}
	facts := union(e.Volume.Facts, r.Facts)
	if e.Identity == identity && facts == e.Volume.Facts {
		return nil
	}
	e.Identity, e.Volume.Facts = identity, facts
	return s.save(e)
}

// guestMayHaveHad tells whether a guest had a disk of which a volume's new device is a part, or which
// cannot be told from it. What becomes of the device as this volume is in its own record. A volume that is known here and
// whose disk has no lasting identity keeps its disk through a reboot, unless a guest had the one at this path.
func (s *Source) guestMayHaveHad(d mounter.Device, identity mounter.Identity, known bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.devices {
		doubt := mayBe(r, d.Path, identity) && (!known || r.Path == d.Path)
		if r.Facts.GivenToGuest && (r.Identity.Overlaps(identity) || doubt) {
			return true
		}
	}
	for _, e := range s.volumes { // these records say the same as those of devices, except where a device's record is unusable
		if e.Volume.Facts.GivenToGuest && e.Identity.Known() && e.Identity.Overlaps(identity) {
			return true
		}
	}
	return false
}

// mayBe tells whether nothing distinguishes a disk from the one of a record: it has no identity that
// outlasts a reboot, and is at the same path, or there was a reboot since.
func mayBe(r deviceRecord, path string, identity mounter.Identity) bool {
	return !identity.Lasting() && (r.Path == path || !r.Identity.Lasting() && r.Identity.Boot != identity.Boot)
}

// noteOverlapping records that a guest had the other devices that share a byte with this one.
func (s *Source) noteOverlapping(id string, identity mounter.Identity) error {
	s.mu.Lock()
	devices := maps.Clone(s.devices)
	s.mu.Unlock()
	for key, r := range devices {
		if r.Facts.GivenToGuest || key == keyOf(identity) || !r.Identity.Overlaps(identity) {
			continue
		}
		r.Facts.GivenToGuest = true
		if err := s.saveDevice(id, key, r); err != nil {
			return err
		}
	}
	return nil
}

// union combines facts so that every restriction of either applies.
func union(a, b volume.Facts) volume.Facts {
	if a.Formatting == nil {
		a.Formatting = b.Formatting
	}
	if a.Formatted == "" {
		a.Formatted = b.Formatted
	}
	if a.Formatted != "" { // the device was formatted since, perhaps as another volume, so the interrupted format is over
		a.Formatting = nil
	}
	a.GivenRaw = a.GivenRaw || b.GivenRaw
	a.GivenToGuest = a.GivenToGuest || b.GivenToGuest
	a.GrowDue = a.GrowDue || b.GrowDue
	a.IdentityDue = a.IdentityDue || b.IdentityDue
	return a
}

func (s *Source) saveDevice(id, key string, r deviceRecord) error {
	if s.bad[s.devicePath(key)] != nil {
		return nil // kept for a person to examine; it prevents formatting
	}
	if err := deviceType.Write(s.devicePath(key), r); err != nil {
		return volume.NotNoted(id, "what it is", err)
	}
	s.mu.Lock()
	s.devices[key] = r
	s.mu.Unlock()
	return nil
}

// SetFacts stores the facts in the state directory: first with the device, then with the
// volume.
func (s *Source) SetFacts(id string, facts volume.Facts) error {
	e, err := s.find(id)
	if err != nil {
		return err
	}
	if e.Identity.Known() {
		key := keyOf(e.Identity)
		s.mu.Lock()
		r := s.devices[key]
		s.mu.Unlock()
		if facts.GivenToGuest {
			if err := s.noteOverlapping(id, e.Identity); err != nil {
				return err
			}
		}
		was := r
		r.Identity, r.Facts = e.Identity, facts
		if facts.GivenRaw && r.RawAs == "" {
			r.RawAs = id
		}
		if r != was {
			if err := s.saveDevice(id, key, r); err != nil {
				return err
			}
		}
		if facts.Formatting != nil {
			if err := record.RemoveVolatile(s.readPath(key)); err != nil {
				return err
			}
		}
	}
	if e.Volume.Facts == facts {
		return nil
	}
	e.Volume.Facts = facts
	return s.save(e)
}

// neverRaw refuses a device that was ever given out raw: its users may have written anywhere,
// and zeros may be their data.
func (s *Source) neverRaw(id string, c claim) error {
	refuse := func(as, doubt string) error {
		return fault.New(fault.State, "volume %s: %s was given out as a raw block device before (as volume %s%s), so it is not formatted: "+
			"what is on it is for its users to know. If that may go, make the file system yourself (for example `mkfs.ext4 %s`): "+
			"the driver takes one that it finds", id, c.device.Path, as, doubt, c.device.Path)
	}
	// The record may be about this disk, or about a disk that contains this one; its file name does not say which.
	for path, err := range s.bad {
		if filepath.Dir(path) == s.known.Path {
			return fmt.Errorf("volume %s: what was done to %s before is not known, so it is not formatted: %w", id, c.device.Path, err)
		}
	}
	s.mu.Lock()
	devices, volumes := maps.Clone(s.devices), maps.Clone(s.volumes)
	s.mu.Unlock()
	for _, r := range devices {
		switch {
		case !r.Facts.GivenRaw:
		case r.Identity.Overlaps(c.identity):
			return refuse(r.RawAs, "")
		case mayBe(r, c.device.Path, c.identity):
			return refuse(r.RawAs,
				"; nothing tells this disk from that one: it has no serial number or other identity that outlasts a reboot")
		}
	}
	for other, e := range volumes {
		switch {
		case !e.Volume.Facts.GivenRaw:
			continue
		case e.Identity.Known(): // the record of its device says the same, unless that is unusable
			if e.Identity.Overlaps(c.identity) {
				return refuse(other, "")
			}
			continue
		}
		// A record of version 1, whose device has not been found since.
		if d, err := s.resolve(other, e.Device); err == nil && !d.Same(c.device) {
			if i, err := mounter.Identify(d); err == nil && i.Lasting() && c.identity.Lasting() && !i.Overlaps(c.identity) {
				continue
			}
		}
		return refuse(other, ", by a record that does not tell which device that was")
	}
	return nil
}

// ProveBlank proves that the device holds nothing that could be lost: by reading all of it, or
// by a probe if the administrator declared that sufficient. It continues an earlier reading of
// this boot.
func (s *Source) ProveBlank(ctx context.Context, id string, progress *volume.Progress) (superblock.Result, superblock.BlankDevice, error) {
	var nothing superblock.Result
	e, err := s.find(id)
	if err != nil {
		return nothing, superblock.BlankDevice{}, err
	}
	s.mu.Lock()
	c, ok := s.attached[id]
	s.mu.Unlock()
	if !ok {
		return nothing, superblock.BlankDevice{}, fault.New(fault.State, "volume %s: its device is not attached", id)
	}
	if err := s.neverRaw(id, c); err != nil {
		return nothing, superblock.BlankDevice{}, err
	}
	if e.Format == IfProbedBlank {
		s.log.InfoContext(ctx, "the administrator's word is that a probe is enough to format the device",
			"volume_id", id, "device", c.device.Path, "identity", c.identity.String())
		return superblock.OnWord(c.device.Path)
	}
	reading, err := s.reading(ctx, id, c, progress)
	if err != nil {
		return nothing, superblock.BlankDevice{}, err
	}
	res, blank, err := superblock.ProveBlank(ctx, c.device.Path, reading)
	if err == nil && res.Content == superblock.Unknown {
		res.Detail += "; if that may go, the volume attribute " + AttrFormat + ": " + IfProbedBlank + " says so"
	}
	return res, blank, err
}

// reading stores and reports the progress of reading a device.
func (s *Source) reading(ctx context.Context, id string, c claim, progress *volume.Progress) (superblock.Reading, error) {
	path := s.readPath(keyOf(c.identity))
	var before readRecord
	if err := readType.Read(path, &before); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.WarnContext(ctx, "how far a device was read is not known any more", "file", path, "error", err)
		before = readRecord{}
	}
	if before.BootID != s.boot || before.Identity != c.identity {
		before = readRecord{}
	}
	log := s.log.With("volume_id", id, "device", c.device.Path)
	var done atomic.Int64
	var size int64
	percent := func() string {
		return fmt.Sprintf("%d%% of %.1f GiB is proven blank", done.Load()*100/max(size, 1), float64(size)/(1<<30))
	}
	const logEvery = 30 * time.Second
	logged := time.Now()
	return superblock.Reading{
		Before: before.Read,
		Begin: func(from, bytes int64) {
			size = bytes
			done.Store(from)
			progress.Describe(percent)
			what := "every byte of the device is read, to prove that it is blank before it is formatted"
			if from > 0 {
				what = "the reading of every byte of the device goes on where it stopped"
			}
			log.InfoContext(ctx, what, "from", from, "bytes", bytes,
				"identity", c.identity.String(), "instead", AttrFormat+": "+IfProbedBlank)
		},
		Note: func(r superblock.Read) error {
			if err := readType.WriteVolatile(path, readRecord{Identity: c.identity, BootID: s.boot, Read: r}); err != nil {
				return err
			}
			done.Store(r.Done) // only stored progress is reported, so that it never goes back
			if time.Since(logged) > logEvery {
				logged = time.Now()
				log.InfoContext(ctx, "the device is being read", "so_far", percent())
			}
			return nil
		},
	}, nil
}
