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
	Metadata   map[string]string `json:"metadata,omitempty"`
	Options    []string          `json:"options,omitempty"`
}

const infoFile = "mountInfo.json"

// describe returns the record of a volume.
func describe(v sandbox.Volume, options []string) ([]byte, error) {
	if (v.ReadOnly || v.Device.ReadOnly) && !slices.Contains(options, "ro") {
		options = append(slices.DeleteFunc(options, func(o string) bool { return o == "rw" }), "ro")
	}
	m := mountInfo{VolumeType: "directvol", Device: v.Device.Path, FSType: v.Type, Options: options}
	if v.Group != nil && !fstype.Of(v.Type).GroupByOption {
		m.Metadata = map[string]string{"fsGroup": strconv.FormatUint(uint64(*v.Group), 10), "fsGroupChangePolicy": string(v.Policy)}
	}
	return json.Marshal(m)
}

// place is the directory where Kata looks for the record of a target. It has the record, and after a container has started with the volume
// an empty file whose name is the sandbox's id.
type place struct {
	root, name string
	target     string
	info       []byte
}

// place returns the place of a target, which is named by the target's path without symbolic links.
func (b *Backend) place(target string) place {
	return place{root: b.Volumes, name: base64.URLEncoding.EncodeToString([]byte(resolved(target))), target: target}
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

func (p place) open() (*os.Root, error) { return os.OpenRoot(p.root) }

// taken tells whether a container of the sandbox has started with the volume.
func (p place) taken(id string) bool {
	_, err := os.Lstat(filepath.Join(p.root, p.name, id))
	return err == nil
}

// write writes the record, at once whole. A record of another volume there is a fault Exists.
func (p place) write() error {
	if err := os.MkdirAll(p.root, 0o700); err != nil {
		return err
	}
	root, err := p.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if !p.fits() {
		return fault.New(fault.Invalid, "host_target_path %q: Kata has no records of a path that is as long", p.target)
	}
	switch have, err := root.ReadFile(filepath.Join(p.name, infoFile)); {
	case err == nil && bytes.Equal(have, p.info):
		return nil
	case err == nil:
		return fault.New(fault.Exists, "Kata has a record of another volume at %s: %.200s", p.target, have)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	// A directory of the name that a crash left is empty, or has the id of a sandbox that still has the volume.
	next := ".crust-" + engine.Name(p.target)
	if err := errors.Join(ignore(root.Remove(filepath.Join(next, infoFile))), ignore(root.Remove(next))); err != nil {
		return err
	}
	if err := root.Mkdir(next, 0o700); err != nil {
		return err
	}
	err = root.WriteFile(filepath.Join(next, infoFile), p.info, 0o600)
	if err == nil {
		err = root.Rename(next, p.name)
	}
	if err != nil {
		if errors.Is(err, fs.ErrExist) || errors.Is(err, linux.ENOTEMPTY) {
			err = fault.New(fault.State, "a sandbox of Kata still has a volume at %s: %w", p.target, err)
		}
		err = errors.Join(err, ignore(root.Remove(filepath.Join(next, infoFile))), ignore(root.Remove(next)))
	}
	return err
}

// takeAway removes the record of a device, so that no container can start with the volume, and returns it. A record of another device
// stays.
func (p place) takeAway(device string) ([]byte, error) {
	root, err := p.open()
	if errors.Is(err, fs.ErrNotExist) || !p.fits() {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer root.Close()
	text, err := root.ReadFile(filepath.Join(p.name, infoFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var have mountInfo
	if err := json.Unmarshal(text, &have); err != nil || have.Device != device {
		return nil, nil // not what this backend wrote
	}
	return text, root.Remove(filepath.Join(p.name, infoFile))
}

// put undoes takeAway: a container has the volume, and another one of the pod may start with it.
func (p place) put(text []byte) error {
	if text == nil {
		return nil
	}
	root, err := p.open()
	if err != nil {
		return err
	}
	defer root.Close()
	return root.WriteFile(filepath.Join(p.name, infoFile), text, 0o600)
}

// leave removes the id of a sandbox that has no record any more, and the directory if it is empty.
func (p place) leave(id string) error {
	root, err := p.open()
	if errors.Is(err, fs.ErrNotExist) || !p.fits() {
		return nil
	}
	if err != nil {
		return err
	}
	defer root.Close()
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
