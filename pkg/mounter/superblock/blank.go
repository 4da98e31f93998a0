package superblock

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// BlankDevice is the proof that a device holds nothing that could be lost: what
// a program that makes file systems asks for. There are these ways to one:
// ProveBlank looked at every byte; OfPool, the pool that made the device knows
// that nothing was written to it; OnWord, the administrator said that a probe is
// enough; Resume, it is what an interrupted mkfs of ours left. The zero value
// proves nothing and is refused.
type BlankDevice struct {
	path         string
	major, minor uint32
	size         int64
	resumed      bool
}

// Resumed tells whether the proof is Resume's: the device holds what an
// interrupted mkfs left.
func (b BlankDevice) Resumed() bool { return b.resumed }

// Path is the device node that was probed; empty for the zero value.
func (b BlankDevice) Path() string { return b.path }

// Verify tells whether the node is still the device that was proven blank, and
// probes it once more.
func (b BlankDevice) Verify() error {
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
	if res.Answer != Blank && !b.resumed {
		return fault.New(fault.State, "%s was blank and now holds %s: somebody wrote to it just now; nothing was changed", b.path, res)
	}
	return nil
}

type device struct {
	BlankDevice
	file *os.File // open with O_DIRECT: another opener's pages may be older than the device
}

func openDevice(path string, flags ...int) (device, error) {
	mode := os.O_RDONLY | linux.ODirect
	for _, f := range flags {
		mode |= f
	}
	f, err := linux.Open(path, mode)
	if err != nil {
		return device{}, err
	}
	st, err := linux.StatxFile(f)
	if err == nil && !st.IsBlock() {
		err = fault.New(fault.State, "%s is no block device", path)
	}
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

// ProbeDevice probes a block device, past the page cache.
func ProbeDevice(path string) (Result, error) {
	res, _, err := probed(path)
	return res, err
}

// probed gives a proof for a device that a probe takes for blank: its caller
// knows that a probe is enough.
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
	if res.Answer != Blank {
		return res, BlankDevice{}, nil
	}
	return res, d.BlankDevice, nil
}

// OfPool is the proof for a device that a pool made, of which it knows that
// nobody was given it since: only package volume, which asks the pool, may call
// it. A probe looks all the same.
func OfPool(path string) (Result, BlankDevice, error) { return probed(path) }

// OnWord is the proof for a device of which the administrator said that it may
// be formatted when a probe takes it for blank: only pkg/volume/static, which
// keeps that word, may call it.
func OnWord(path string) (Result, BlankDevice, error) { return probed(path) }

// Identify is ProbeDevice for a device that was formatted with that file system before:
// when a whole superblock of that type is where it belongs, it looks no
// further.
func Identify(path, name string) (Result, error) {
	d, err := openDevice(path)
	if err != nil {
		return Result{}, err
	}
	defer d.file.Close()
	start := fstype.Of(name).Head
	if start > 0 && d.size >= start {
		// Past the page cache, which would read 128 KiB ahead and be thrown away
		// when the device is closed.
		head := make([]byte, start)
		if _, err := (linux.Direct{File: d.file}).ReadAt(head, 0); err != nil {
			return Result{}, fmt.Errorf("%s: %w", path, err)
		}
		if found := detect(&image{head: head, size: d.size}); len(found) == 1 && found[0].Answer == Known && found[0].Type == name {
			return found[0], nil
		}
	}
	return Probe(linux.Direct{File: d.file}, d.size)
}

// Fingerprint is a sum over the place of a block device where ext2/3/4, xfs and
// btrfs have their first superblock. Their repair programs write there whenever
// they change anything, so an equal fingerprint says that none did.
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

// Intent is written down before a proven blank device is formatted, so that a
// crash in the middle of mkfs, which leaves neither a blank device nor a file
// system, can be told from foreign data.
type Intent struct {
	fstype string
	size   int64
}

// Intent makes the note for formatting this device with that file system.
func (b BlankDevice) Intent(fstype string) Intent { return Intent{fstype, b.size} }

// Type is the file system that the device was to get; empty for no intent.
func (i Intent) Type() string { return i.fstype }

type intentJSON struct {
	Type string `json:"type"`
	Size int64  `json:"sizeBytes"`
}

// MarshalJSON writes the intent down.
func (i Intent) MarshalJSON() ([]byte, error) { return json.Marshal(intentJSON{i.fstype, i.size}) }

// UnmarshalJSON reads it again.
func (i *Intent) UnmarshalJSON(b []byte) error {
	var j intentJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	*i = Intent{j.Type, j.Size}
	return nil
}

// Resume looks at a device on which a format was begun and never recorded as
// finished: such a device was blank then and nobody was given it since. The
// answer Known means that mkfs had finished. Otherwise the proof allows it to
// be formatted again, unless another format has appeared there.
func Resume(path string, i Intent) (Result, BlankDevice, error) {
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
	case res.Answer == Known && res.Type == i.fstype:
		return res, BlankDevice{}, nil
	case res.Answer == Known, d.size < i.size:
		return res, BlankDevice{}, fault.New(fault.State,
			"%s was being formatted with %s (%d bytes) when the driver stopped, and now holds %s (%d bytes): somebody else wrote to it; save the "+
				"data, or delete the volume", path, i.fstype, i.size, res, d.size)
	}
	d.resumed = res.Answer != Blank
	return res, d.BlankDevice, nil
}
