package mounter

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// CheckOptions refuses (fault.Invalid) superblock options that are not allowed for file systems
// of that type. With an empty name (type not known yet), it refuses options that no file system
// allows.
func CheckOptions(name string, o Options) error {
	t := fstype.Of(name)
	for _, opt := range o.Superblock {
		if contextOptions[opt.Key] {
			continue
		}
		if name != "" {
			if !permits(t.Allowed(), opt) {
				return refuseOption(opt, t)
			}
			continue
		}
		if !slices.ContainsFunc(fstype.All(), func(t fstype.Type) bool { return permits(t.Options, opt) }) {
			return refuseOption(opt, fstype.Of("any file system"))
		}
	}
	return nil
}

func permits(list []string, o Option) bool {
	return slices.Contains(list, o.String()) || o.Value != "" && slices.Contains(list, o.Key+"=")
}

func refuseOption(o Option, t fstype.Type) error {
	these, list := "", t.Allowed()
	if len(list) > 0 {
		these = "; allowed are " + strings.Join(list, ", ") + ", and those of the mount itself (ro, noatime, nosuid, ...)"
	}
	return fault.New(fault.Invalid, "mount option %q is not allowed for %s%s", o, t.Name, these)
}

// withoutPanic adds the option for the behaviour on errors if the superblock asks for a panic.
// The content of a volume must not take down the node.
func withoutPanic(fs Filesystem) (Filesystem, error) {
	p := fstype.Of(fs.Type).Panic
	if p == nil || slices.ContainsFunc(fs.Options.Superblock, func(o Option) bool { return o.Key == p.Unless }) {
		return fs, nil
	}
	// Bypass the page cache: the kernel drops the page when it mounts, and reads again.
	f, err := linux.Open(fs.Device.Path, linux.ODirect)
	if err != nil {
		return fs, err
	}
	defer f.Close()
	var b [2]byte
	if _, err := (linux.Direct{File: f}).ReadAt(b[:], p.At); err != nil {
		return fs, err
	}
	var options [1]byte
	if _, err := (linux.Direct{File: f}).ReadAt(options[:], p.Options); err != nil {
		return fs, err
	}
	if binary.LittleEndian.Uint16(b[:]) == p.Value || options[0] != 0 {
		fs.Options = fs.Options.With(p.Unless, p.Calm)
	}
	return fs, nil
}
