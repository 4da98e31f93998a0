package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// stagedRecord says how a volume is staged. Nothing is mounted at stage, so the kernel does not
// know. A reboot voids it.
type stagedRecord struct {
	VolumeID    string                               `json:"volumeID"`
	BootID      string                               `json:"bootID"`
	StagingPath string                               `json:"stagingPath"`
	Block       bool                                 `json:"block,omitempty"`
	FSType      string                               `json:"fsType,omitempty"`
	Mode        csi.VolumeCapability_AccessMode_Mode `json:"accessMode"`
	Share       string                               `json:"share,omitempty"`
	Device      mounter.Device                       `json:"device"` // zero for a share
	// Superblock holds the superblock options of the live mounts, or, if there are none, those
	// requested at stage.
	Superblock string `json:"superblockOptions,omitempty"`
	// HostMayMount of the volume's class.
	HostMayMount bool `json:"hostMayMount,omitempty"`
}

var stagedType = record.Type{Kind: "crust-csi.staged", Version: 1}

type stagedVolumes struct {
	dir  record.Dir[stagedRecord]
	boot string
	mu   sync.Mutex
	m    map[string]stagedRecord
	bad  map[string]error // unusable records, by path
}

func loadStaged(dir, boot string, log *slog.Logger) (*stagedVolumes, error) {
	s := &stagedVolumes{boot: boot, m: map[string]stagedRecord{}, bad: map[string]error{},
		dir: record.Dir[stagedRecord]{Path: dir, Type: stagedType, Name: func(r stagedRecord) string { return record.Name(r.VolumeID) }}}
	return s, s.dir.Load(func(path string, r stagedRecord, err error) error {
		var unread *fs.PathError
		switch {
		case fault.Is(err, fault.State), errors.As(err, &unread): // from a newer version, which may rely on it, or unreadable
			s.bad[path] = record.Unusable(err)
			log.Error("a record cannot be used; everything else goes on without it", "file", path, "error", s.bad[path])
		case err != nil:
			// Torn by a power loss: the volume is not staged, or the record is damaged. To stage it
			// anew is right in both cases.
			log.Warn("how a volume was staged cannot be read; it counts as not staged", "file", path,
				"kept_as", path+record.Suffix, "error", err)
			return record.SetAside(path)
		case r.BootID != boot:
			log.Info("forgetting that a volume was staged before the machine restarted", "file", path)
			return record.RemoveVolatile(path)
		default:
			s.m[r.VolumeID] = r
		}
		return nil
	})
}

func (s *stagedVolumes) path(id string) string { return s.dir.File(record.Name(id)) }

func (s *stagedVolumes) get(id string) (stagedRecord, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.m[id]
	return r, ok
}

// unusable returns the error for a volume whose record is unusable, and nil for any other.
func (s *stagedVolumes) unusable(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.bad[s.path(id)]; err != nil {
		return fmt.Errorf("volume %s, which is staged: %w; or unpublish and unstage it", id, err)
	}
	return nil
}

// wasTorn tells whether the volume had a record that was set aside, by this process or an earlier one. Unknown counts as yes.
func (s *stagedVolumes) wasTorn(id string) bool {
	_, err := os.Lstat(s.path(id) + record.Suffix)
	return !errors.Is(err, fs.ErrNotExist)
}

func (s *stagedVolumes) all() map[string]stagedRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.m)
}

func (s *stagedVolumes) put(r stagedRecord) error {
	r.BootID = s.boot
	if old, ok := s.get(r.VolumeID); ok && old == r {
		return nil
	}
	if err := stagedType.WriteVolatile(s.path(r.VolumeID), r); err != nil {
		return volume.NotNoted(r.VolumeID, "how it is staged", err)
	}
	s.mu.Lock()
	s.m[r.VolumeID] = r
	s.mu.Unlock()
	return nil
}

func (s *stagedVolumes) remove(id string) error {
	if s.unusable(id) != nil {
		if err := record.SetAside(s.path(id)); err != nil {
			return volume.NotNoted(id, "that it is unstaged", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.bad, s.path(id))
		return nil
	}
	if err := record.RemoveVolatile(s.path(id)); err != nil {
		return volume.NotNoted(id, "that it is unstaged", err)
	}
	s.mu.Lock()
	delete(s.m, id)
	s.mu.Unlock()
	return nil
}
