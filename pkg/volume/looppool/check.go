package looppool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

const (
	imageExtension = ".img"
	temporary      = ".tmp"
)

// Contents is the content of a pool's directory, as its files show it.
type Contents struct {
	Volumes  []volume.Volume // finished ones with a readable record, by id
	Findings []volume.Finding
}

// Check reports inconsistencies in the pool. An operation in progress shows up too: the caller
// must know its operations.
func (p *Pool) Check() ([]volume.Finding, error) {
	c, err := CheckDir(p.name, p.dir)
	return c.Findings, err
}

// CheckDir examines the directory of a pool, whether or not a process has it open. It changes
// nothing and does not take the lock.
func CheckDir(name, dir string) (Contents, error) {
	if err := volume.CheckPoolName(name); err != nil {
		return Contents{}, err
	}
	c := checked{name: name, dir: dir, volumes: map[string]bool{}}
	if err := checkAll(&c, "volumes", readVolume, false, c.volume); err != nil {
		return Contents{}, err
	}
	if err := checkAll(&c, "snapshots", readSnapshot, true, c.snapshot); err != nil {
		return Contents{}, err
	}
	return c.Contents, nil
}

func readVolume(path string) (journal.VolumeRecord, error) {
	return journal.ReadVolume(journal.Format(volumeType), path)
}

func readSnapshot(path string) (journal.SnapshotRecord, error) {
	return journal.ReadSnapshot(journal.Format(snapshotType), path)
}

type checked struct {
	Contents
	name, dir string
	volumes   map[string]bool // by key; including those with an unusable record
}

func (c *checked) add(kind volume.Kind, id, path, means, do string) {
	c.Findings = append(c.Findings, volume.Finding{Kind: kind, ID: id, Path: path, Means: means, Do: do})
}

// checkAll checks one of the two directories: each record, then the remaining files.
func checkAll[R any](
	c *checked, sub string, read func(path string) (R, error), snapshots bool, look func(key, rec, img string, r R),
) error {
	dir := filepath.Join(c.dir, sub)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is no directory of a pool: %w", c.dir, err)
	}
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		base, ext := split(e.Name())
		id := c.name + "." + base
		_, _, snapshot, ok := volume.ParseID(id)
		if !ok || snapshot != snapshots || !e.Type().IsRegular() {
			if ext == temporary {
				c.leftOver("", path)
				continue
			}
			c.add(volume.UnknownFile, "", path, "the driver makes no file of this name; it takes room of the pool",
				"look what it is, and move it away")
			continue
		}
		switch ext {
		case temporary:
			c.leftOver(id, path)
		case record.Extension:
			switch r, err := read(path); {
			case errors.Is(err, fs.ErrNotExist): // removed meanwhile
			case err != nil:
				c.volumes[base] = !snapshots
				c.add(volume.RecordUnusable, id, path, "the record cannot be read: "+err.Error()+"; its file is kept and cannot be used",
					"put a good copy of the record in its place, or start the version of the driver that wrote it; then restart the driver")
			default:
				look(base, path, filepath.Join(dir, base+imageExtension), r)
			}
		case imageExtension:
			if !names[base+record.Extension] {
				c.add(volume.FileWithoutRecord, id, path,
					"no record tells what this file is; it may be a volume whose record was lost, so nothing overwrites it",
					"put its record back ("+base+record.Extension+
						" beside it) and restart the driver; or move the file away, once nobody misses its data")
			}
		}
	}
	return nil
}

// split splits a file's name. It returns "" for extensions that a pool does not use.
func split(name string) (base, ext string) {
	for _, ext := range []string{record.Extension + temporary, record.Extension, imageExtension} {
		if base, ok := strings.CutSuffix(name, ext); ok {
			if strings.HasSuffix(ext, temporary) {
				ext = temporary
			}
			return base, ext
		}
	}
	return "", ""
}

func (c *checked) leftOver(id, path string) {
	c.add(volume.LeftOver, id, path, "a crash cut the writing of a record short; the record itself is whole, the old one or none",
		"nothing: it takes no room to speak of, and the next writing of that record replaces it")
}

func (c *checked) volume(key, rec, img string, r journal.VolumeRecord) {
	c.volumes[key] = true
	r.Volume.ID = c.name + "." + key // the pool may have been renamed since
	if r.State != journal.Ready {
		c.unfinished(r.Volume.ID, rec, r.State)
		return
	}
	c.Volumes = append(c.Volumes, r.Volume)
	c.file(r.Volume.ID, img, r.Volume.Size)
}

func (c *checked) snapshot(key, rec, img string, r journal.SnapshotRecord) {
	id := c.name + "." + key
	if r.State != journal.Ready {
		c.unfinished(id, rec, r.State)
		return
	}
	c.file(id, img, r.Snapshot.Size)
	if _, origin, _, ok := volume.ParseID(r.Snapshot.Volume); !ok || !c.volumes[origin] {
		c.add(volume.SnapshotAlone, id, img, fmt.Sprintf("snapshot %q was taken of volume %s, which is not in the pool any more, and "+
			"neither is its claim", r.Snapshot.Name, r.Snapshot.Volume),
			"nothing if it is kept on purpose, as a backup: it can be restored; otherwise delete its VolumeSnapshot, or `crustctl volume delete "+
				id+"` if it has none")
	}
}

func (c *checked) unfinished(id, rec string, state journal.State) {
	switch state {
	case journal.Creating:
		c.add(volume.Unfinished, id, rec, "a crash cut its making short, and nobody was told that it was made",
			"restart the driver: it removes what is there of it")
	case journal.Deleting:
		c.add(volume.Unfinished, id, rec, "a crash or an error cut its deletion short",
			"restart the driver: it goes on with it, and its log says who has it if it cannot")
	default:
		c.add(volume.RecordUnusable, id, rec, fmt.Sprintf("the record has the state %q, which the driver does not know", state),
			"put a good copy of the record in its place, and restart the driver")
	}
}

// file compares the size of a file with its record.
func (c *checked) file(id, img string, size int64) {
	st, err := os.Lstat(img)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		c.add(volume.RecordWithoutFile, id, img, "its file is gone, and the data with it",
			"restore the file from a backup; or delete the volume or snapshot, and with it the record")
	case err != nil:
		c.add(volume.RecordWithoutFile, id, img, "its file cannot be looked at: "+err.Error(), "look at the pool's file system (dmesg)")
	case !st.Mode().IsRegular():
		c.add(volume.RecordWithoutFile, id, img, "what lies there is no regular file",
			"look who put it there; restore the file from a backup")
	case st.Size() < size:
		c.add(volume.FileTooShort, id, img,
			fmt.Sprintf("its file has %d bytes, its record says %d: somebody truncated it, and what lay behind its end is lost",
				st.Size(), size),
			"stop its pods; restore a snapshot or a backup, or delete it")
	case st.Size() > size:
		c.add(volume.FileTooLong, id, img,
			fmt.Sprintf("its file has %d bytes, its record says %d: a crash cut a growth short, and nothing is lost", st.Size(), size),
			"nothing: the driver takes the size of the file when it starts, or uses the volume next")
	}
}
