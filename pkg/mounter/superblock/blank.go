package superblock

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// BlankDevice is the proof that a device holds nothing that could be lost. Programs that make
// file systems require it. Its sources are: ProveBlank, which reads every byte; OfPool, if the
// pool that made the device knows that nothing was written; OnWord, if the administrator
// declared a probe to be sufficient; Resume, for what an interrupted mkfs of this driver left.
// The zero value proves nothing and is refused.
type BlankDevice struct {
	path         string
	major, minor uint32
	size         int64
	resumed      bool
}

// Resumed reports whether the proof comes from Resume: the device holds what an interrupted
// mkfs left.
func (b BlankDevice) Resumed() bool { return b.resumed }

// Path returns the device node that was probed, or "" for the zero value.
func (b BlankDevice) Path() string { return b.path }

// Fits returns a fault OutOfRange if the device is too small for a file system of that type.
func (b BlankDevice) Fits(name string) error {
	if least := fstype.Of(name).Minimum; b.size < least {
		return fault.New(fault.OutOfRange, "%s has %d bytes, and a file system of type %s needs %d: use a larger device, or another file system",
			b.path, b.size, name, least)
	}
	return nil
}

// ErrNotProven is in the errors of Verify: nothing has been changed on the device.
var ErrNotProven = errors.New("the device is not proven blank")

type notProven struct{ error }

func (e notProven) Unwrap() error      { return e.error }
func (notProven) Is(target error) bool { return target == ErrNotProven }

// Verify checks that the node is still the device that was proven blank, and probes it once
// more. Its errors are ErrNotProven.
func (b BlankDevice) Verify() error {
	if err := b.verify(); err != nil {
		return notProven{err}
	}
	return nil
}

func (b BlankDevice) verify() error {
	if b.path == "" {
		return fault.New(fault.State, "no proof that the device is blank")
	}
	now, err := openDevice(b.path)
	if err != nil {
		return err
	}
	defer now.file.Close()
	if now.major != b.major || now.minor != b.minor || now.size != b.size {
		return fault.New(fault.State, "%s is another device, or has another size, than the one that was proven blank", b.path)
	}
	res, err := Probe(linux.Direct{File: now.file}, now.size)
	if err != nil {
		return fmt.Errorf("%s: %w", b.path, err)
	}
	if res.Content != Blank && !b.resumed {
		return fault.New(fault.State, "%s was blank and now holds %s: somebody wrote to it just now; nothing was changed", b.path, res)
	}
	return nil
}

type device struct {
	BlankDevice
	file *os.File // open with O_DIRECT, because pages cached by others may be older than the device
}

func openDevice(path string, flags ...int) (device, error) {
	mode := os.O_RDONLY | linux.ODirect
	for _, f := range flags {
		mode |= f
	}
	f, err := linux.OpenBlock(path, mode)
	switch {
	case errors.Is(err, linux.ENOENT):
		err = fault.New(fault.State, "the device does not exist on this node: %w", err)
	case errors.Is(err, linux.ENOTBLK):
		err = fault.New(fault.State, "%s is no block device", path)
	}
	if err != nil {
		return device{}, err
	}
	st, err := linux.StatxFile(f)
	var size int64
	if err == nil {
		size, err = linux.BlockSize64(f)
	}
	if err != nil {
		f.Close()
		return device{}, err
	}
	return device{BlankDevice{path: path, major: st.RdevMajor, minor: st.RdevMinor, size: size}, f}, nil
}

// ProbeDevice probes a block device. It bypasses the page cache. For this and all functions here that
// take a path, a missing device node is a fault.State whose errors.Is(err, fs.ErrNotExist) is true.
func ProbeDevice(path string) (Result, error) {
	res, _, err := probed(path)
	return res, err
}

// probed returns a proof for a device that a probe finds blank. Only callers for which a probe
// is sufficient may use it.
func probed(path string) (Result, BlankDevice, error) {
	d, err := openDevice(path)
	if err != nil {
		return Result{}, BlankDevice{}, err
	}
	defer d.file.Close()
	res, err := Probe(linux.Direct{File: d.file}, d.size)
	if err != nil {
		return Result{}, BlankDevice{}, fmt.Errorf("%s: %w", path, err)
	}
	if res.Content != Blank {
		return res, BlankDevice{}, nil
	}
	return res, d.BlankDevice, nil
}

// OfPool returns the proof for a device that a pool made and has given to nobody since. Only
// package volume, which asks the pool, may call it. It also probes the device.
func OfPool(path string) (Result, BlankDevice, error) { return probed(path) }

// OnWord returns the proof for a device that the administrator allowed to be formatted if a
// probe finds it blank. Only pkg/volume/static, which stores that permission, may call it.
func OnWord(path string) (Result, BlankDevice, error) { return probed(path) }

// Identify is like ProbeDevice, for a device that was formatted with file system name before.
// If a valid superblock of that type is in its place, it reads nothing else.
func Identify(path, name string) (Result, error) {
	d, err := openDevice(path)
	if err != nil {
		return Result{}, err
	}
	defer d.file.Close()
	start := fstype.Of(name).Head
	if start > 0 && d.size >= start {
		// Bypass the page cache, which would read 128 KiB ahead and be dropped when the device
		// is closed.
		head := make([]byte, start)
		if _, err := (linux.Direct{File: d.file}).ReadAt(head, 0); err != nil {
			return Result{}, fmt.Errorf("%s: %w", path, err)
		}
		found := detect(&image{head: head, size: d.size})
		if len(found) == 1 && found[0].Content == Known && found[0].Type == name {
			return found[0], nil
		}
	}
	return Probe(linux.Direct{File: d.file}, d.size)
}

// Fingerprint returns a hash of the region of a block device in which file systems have their
// first superblock. Repair programs write there when they remove the mark because of which a
// check was due, so an equal fingerprint means that none did.
func Fingerprint(path string) (string, error) {
	d, err := openDevice(path)
	if err != nil {
		return "", err
	}
	defer d.file.Close()
	b := make([]byte, min(d.size&^4095, headSize/2))
	if _, err := (linux.Direct{File: d.file}).ReadAt(b, 0); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b)), nil
}

// Intent is recorded before a proven blank device is formatted. A crash during mkfs leaves
// neither a blank device nor a file system; the intent distinguishes that from foreign data.
type Intent struct {
	fstype string
	size   int64
}

// Intent returns the record for formatting this device with that file system.
func (b BlankDevice) Intent(fstype string) Intent { return Intent{fstype, b.size} }

// Type is the intended file system; empty for no intent.
func (i Intent) Type() string { return i.fstype }

type intentJSON struct {
	Type string `json:"type"`
	Size int64  `json:"sizeBytes"`
}

// MarshalJSON implements json.Marshaler.
func (i Intent) MarshalJSON() ([]byte, error) { return json.Marshal(intentJSON{i.fstype, i.size}) }

// UnmarshalJSON implements json.Unmarshaler.
func (i *Intent) UnmarshalJSON(b []byte) error {
	var j intentJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	*i = Intent{j.Type, j.Size}
	return nil
}

// Resume examines a device on which a format began and is not recorded as finished. The device
// was blank then, and nobody has received it since. The answer Known means that mkfs had
// finished. Otherwise the proof permits formatting it again, unless another format is there now:
// such a proof allows overwriting what no detector knows. An Intent of nothing is a fault State.
func Resume(path string, i Intent) (Result, BlankDevice, error) {
	if i.fstype == "" || i.size <= 0 {
		return Result{}, BlankDevice{}, fault.New(fault.State, "%s: no format of it is on record, so there is none to go on with", path)
	}
	d, err := openDevice(path)
	if err != nil {
		return Result{}, BlankDevice{}, err
	}
	defer d.file.Close()
	res, err := Probe(linux.Direct{File: d.file}, d.size)
	if err != nil {
		return Result{}, BlankDevice{}, fmt.Errorf("%s: %w", path, err)
	}
	switch {
	case res.Content == Known && res.Type == i.fstype:
		return res, BlankDevice{}, nil
	case res.Content == Known, d.size < i.size:
		return res, BlankDevice{}, fault.New(fault.State,
			"%s was being formatted with %s (%d bytes) when the driver stopped, and now holds %s (%d bytes): somebody else wrote to it; save the "+
				"data, or delete the volume", path, i.fstype, i.size, res, d.size)
	}
	d.resumed = res.Content != Blank
	return res, d.BlankDevice, nil
}
