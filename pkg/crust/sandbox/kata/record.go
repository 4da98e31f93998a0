package kata

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// mountInfo is Kata's record of a direct-assigned volume.
type mountInfo struct {
	VolumeType string            `json:"volume-type"`
	Device     string            `json:"device"`
	FSType     string            `json:"fstype"`
	Metadata   map[string]string `json:"metadata"` // older runtimes in Rust ask for both, even if they are empty
	Options    []string          `json:"options"`
}

const infoFile = "mountInfo.json"

// describe returns the record of a volume.
func describe(v sandbox.Volume, options []string) ([]byte, error) {
	if (v.ReadOnly || v.Device.ReadOnly) && !slices.Contains(options, "ro") {
		options = append(slices.DeleteFunc(options, func(o string) bool { return o == "rw" }), "ro")
	}
	m := mountInfo{VolumeType: "directvol", Device: v.Device.Path, FSType: v.Type, Metadata: map[string]string{}, Options: []string{}}
	m.Options = append(m.Options, options...)
	// Kata's agent would try to change the files of a read-only volume, too.
	if v.Group != nil && !fstype.Of(v.Type).GroupByOption && !v.ReadOnly && !v.Device.ReadOnly {
		m.Metadata = map[string]string{"fsGroup": strconv.FormatUint(uint64(*v.Group), 10), "fsGroupChangePolicy": string(v.Policy)}
	}
	return json.Marshal(m)
}

// place is the directory where Kata looks for the record of a target. It has the record and, once a container is being started with the
// volume, an empty file whose name is the sandbox's id.
type place struct {
	b      *Backend
	name   string
	target string
}

// place returns the place of a target, which is named by the target's path without symbolic links.
func (b *Backend) place(target string) place {
	return place{b: b, name: base64.URLEncoding.EncodeToString([]byte(resolved(target))), target: target}
}

// resolved resolves the links of the part of a path that exists.
func resolved(path string) string {
	for rest := ""; ; {
		if whole, err := filepath.EvalSymlinks(path); err == nil {
			return filepath.Join(whole, rest)
		}
		if path == "/" {
			return filepath.Join(path, rest)
		}
		path, rest = filepath.Dir(path), filepath.Join(filepath.Base(path), rest)
	}
}

// fits tells whether a directory can have the name.
func (p place) fits() bool {
	const most = 255
	return len(p.name) <= most
}

func (p place) open() (*os.Root, error) { return os.OpenRoot(p.b.Volumes) }

// taken tells whether Kata has begun to start a container of the sandbox with the volume.
func (p place) taken(id string) bool {
	_, err := os.Lstat(filepath.Join(p.b.Volumes, p.name, id))
	return err == nil
}

// has tells whether the record is there.
func (p place) has(record []byte) bool {
	have, err := os.ReadFile(filepath.Join(p.b.Volumes, p.name, infoFile))
	return err == nil && bytes.Equal(have, record)
}

// write writes the record of a sandbox's volume. A record that says something else is a fault Exists.
func (p place) write(id string, record []byte) error {
	if !p.fits() {
		return fault.New(fault.Invalid, "host_target_path %q: Kata has no records of a path that is as long", p.target)
	}
	if err := os.MkdirAll(p.b.Volumes, 0o700); err != nil {
		return err
	}
	root, err := p.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if p.has(record) {
		return nil
	}
	switch have, err := root.ReadFile(filepath.Join(p.name, infoFile)); {
	case err == nil:
		return fault.New(fault.Exists, "Kata has another record at %s, which this server did not write: %.200s", p.target, have)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := p.ofOthers(root, id); err != nil {
		return err
	}
	return p.put(root, record)
}

// ofOthers refuses a place where another sandbox has a volume. It removes the ids of sandboxes that Kata has no directory of.
func (p place) ofOthers(root *os.Root, id string) error {
	names, err := names(root, p.name)
	for _, name := range names {
		if name == id {
			continue
		}
		if _, serr := os.Lstat(filepath.Join(p.b.Sandboxes, name)); !errors.Is(serr, fs.ErrNotExist) {
			return fault.New(fault.State, "the sandbox %q of Kata still has a volume at %s", name, p.target)
		}
		err = errors.Join(err, ignore(root.Remove(filepath.Join(p.name, name))))
	}
	return err
}

func names(root *os.Root, dir string) ([]string, error) {
	d, err := root.Open(dir)
	if err != nil {
		return nil, ignore(err)
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// put puts a record to its place, at once whole, as Kata may read it at any time.
func (p place) put(root *os.Root, record []byte) error {
	if err := root.Mkdir(p.name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	next := ".crust-" + engine.Name(p.target) // not in the place: Kata takes every other file there for a sandbox's id
	err := root.WriteFile(next, record, 0o600)
	if err == nil {
		err = root.Rename(next, filepath.Join(p.name, infoFile))
	}
	if err != nil {
		err = errors.Join(err, ignore(root.Remove(next)))
	}
	return err
}

// takeAway removes the record, so that no container can start with the volume, and tells whether it was there. Another record stays.
func (p place) takeAway(record []byte) (was bool, err error) {
	root, err := p.open()
	if err != nil || !p.fits() {
		return false, ignore(err)
	}
	defer root.Close()
	have, err := root.ReadFile(filepath.Join(p.name, infoFile))
	if err != nil || !bytes.Equal(have, record) {
		return false, ignore(err)
	}
	return true, root.Remove(filepath.Join(p.name, infoFile))
}

// putBack undoes takeAway: a container has the volume, and another one of the pod may start with it.
func (p place) putBack(record []byte) error {
	root, err := p.open()
	if err != nil {
		return err
	}
	defer root.Close()
	return p.put(root, record)
}

// leave removes the id of a sandbox that has no record any more, and the directory if it is empty.
func (p place) leave(id string) error {
	root, err := p.open()
	if err != nil || !p.fits() {
		return ignore(err)
	}
	defer root.Close()
	if _, err := root.Lstat(filepath.Join(p.name, infoFile)); err == nil {
		return nil // of somebody else
	}
	err = ignore(root.Remove(filepath.Join(p.name, id)))
	if rerr := root.Remove(p.name); rerr != nil && !errors.Is(rerr, linux.ENOTEMPTY) {
		err = errors.Join(err, ignore(rerr))
	}
	return err
}

func ignore(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
