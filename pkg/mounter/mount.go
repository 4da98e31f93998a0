package mounter

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Mount is one mount as the kernel tells it.
type Mount struct {
	Path         string // where, as seen from this process; from Table only
	Type         string // of the file system
	Source       string
	Part         bool   // of Table: a part of a file system is bound there, such as one file
	Options      string // of the superblock, comma-separated
	ReadOnly     bool   // by the mount or by the superblock
	ReadOnlySB   bool   // by the superblock
	Major, Minor uint32 // of the superblock: the block device for ext4 and xfs
}

// mount asks the kernel about the mount that f is on: statmount(2) where it
// tells everything (Linux 6.14), the line of mountinfo where not.
func mountOf(st linux.Statx) (Mount, error) {
	const want = linux.StatmountSBBasic | linux.StatmountMntBasic |
		linux.StatmountFSType | linux.StatmountMntOpts | linux.StatmountSBSource
	if st.MountIDUnique {
		s, err := linux.StatmountByID(st.MountID, want)
		if err != nil {
			return Mount{}, fmt.Errorf("%w: %w", errNoStatmount, err)
		}
		if s.Mask&want == want {
			sbRO := s.SBFlags&linux.SBRdonly != 0
			return Mount{
				Type: s.FSType, Source: s.Source, Options: s.Options,
				ReadOnly: sbRO || s.Attr&linux.MountAttrRdonly != 0, ReadOnlySB: sbRO,
				Major: s.Major, Minor: s.Minor,
			}, nil
		}
	}
	return Mount{}, errNoStatmount
}

var errNoStatmount = errors.New("this kernel's statmount does not tell everything")

// Mount tells what is mounted at a target whose Occupant is MountPoint.
func (s *State) Mount() (Mount, error) {
	m, err := mountOf(s.stat)
	if err == nil {
		return m, nil
	}
	// The classic mount id, for mountinfo.
	id, err := classicMountID(s.file)
	if err != nil {
		return Mount{}, err
	}
	return mountByID(s.file, id)
}

// mountByID finds a mount in mountinfo.
func mountByID(f *os.File, id int) (Mount, error) {
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return i.ID != id, i.ID == id })
	if err != nil {
		return Mount{}, err
	}
	if len(infos) == 0 {
		return Mount{}, fault.New(fault.State, "%s was unmounted just now", f.Name())
	}
	return fromInfo(infos[0]), nil
}

func classicMountID(f *os.File) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var id int
		if _, err := fmt.Sscanf(line, "mnt_id:\t%d", &id); err == nil {
			return id, nil
		}
	}
	return 0, fmt.Errorf("%s: /proc/self/fdinfo tells no mnt_id", f.Name())
}

func fromInfo(i *mountinfo.Info) Mount {
	m := Mount{
		Path: i.Mountpoint, Type: i.FSType, Source: i.Source, Options: i.VFSOptions,
		Major: uint32(i.Major), Minor: uint32(i.Minor),
	}
	m.ReadOnlySB = hasOption(i.VFSOptions, "ro")
	m.ReadOnly = m.ReadOnlySB || hasOption(i.Options, "ro")
	return m
}

func hasOption(options, name string) bool {
	for o := range strings.SplitSeq(options, ",") {
		if o == name {
			return true
		}
	}
	return false
}

// Table is one look at every mount in this process's namespace whose mount
// point lies below the root. It costs time in proportion to all mounts: for
// the start of a program, never for a call.
func (r *Root) Table() ([]Mount, error) {
	prefix := strings.TrimSuffix(r.real, "/") + "/"
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Mountpoint, prefix), false
	})
	if err != nil {
		return nil, err
	}
	table := make([]Mount, len(infos))
	for n, i := range infos {
		table[n] = fromInfo(i)
		table[n].Part = i.Root != "/"
		table[n].Path = strings.TrimSuffix(r.path, "/") + "/" + strings.TrimPrefix(i.Mountpoint, prefix)
	}
	return table, nil
}

// Device gives the block device that a mount point shows: the one its file
// system is on, or (block) whose node is bound there. ok is false when it is
// neither.
func (s *State) Device() (d Device, ok bool, err error) {
	switch {
	case s.Occupant != MountPoint:
		return Device{}, false, nil
	case s.stat.IsBlock():
		return Device{Major: s.stat.RdevMajor, Minor: s.stat.RdevMinor}, true, nil
	case s.stat.DevMajor != 0:
		return Device{Major: s.stat.DevMajor, Minor: s.stat.DevMinor}, true, nil
	}
	// btrfs has an anonymous device number; its source says which device.
	m, err := s.Mount()
	if err != nil {
		return Device{}, false, err
	}
	return m.Device()
}

// Group is the group of what is mounted, as processes see it: with the mount's
// id map, if it has one.
func (s *State) Group() uint32 { return s.stat.GID }

// IsBlock tells whether what is mounted is a bound block device node.
func (s *State) IsBlock() bool { return s.stat.IsBlock() }

// Device gives the block device that the mount's file system is on, or whose
// node it shows. It is an error where the file system tells its path only, and
// that leads nowhere, as that of a disk which was pulled.
func (m Mount) Device() (Device, bool, error) {
	if m.Part {
		// A bound device node, of devtmpfs or of wherever it was made. The path
		// leads to it.
		if st, err := linux.StatxPath(m.Path); err == nil && st.IsBlock() {
			return Device{Path: m.Path, Major: st.RdevMajor, Minor: st.RdevMinor}, true, nil
		}
	}
	if m.Major != 0 {
		return Device{Path: m.Source, Major: m.Major, Minor: m.Minor}, true, nil
	}
	if !fstype.Of(m.Type).Numberless {
		return Device{}, false, nil
	}
	st, err := linux.StatxPath(m.Source)
	if err != nil {
		return Device{Path: m.Source}, false, fmt.Errorf("%s is mounted at %s, and which device that is cannot be told: %w", m.Source, m.Path, err)
	}
	return Device{Path: m.Source, Major: st.RdevMajor, Minor: st.RdevMinor}, st.IsBlock(), nil
}

// Same tells whether two name one device.
func (d Device) Same(o Device) bool { return d.Major == o.Major && d.Minor == o.Minor }

// Differs compares a mounted file system with what is asked for; empty when
// they agree, else what is there and what was asked.
func (s *State) Differs(fs Filesystem) (string, error) {
	if s.IsBlock() {
		return "a block device is there, a file system was asked for", nil
	}
	st, err := linux.Fstatfs(s.file)
	if err != nil {
		return "", err
	}
	want, mask := fs.Options.statfsFlags(fs.ReadOnly || fs.Device.ReadOnly)
	if got := st.Flags & mask; got != want {
		return fmt.Sprintf("mounted %s, asked for %s", describeFlags(got), describeFlags(want)), nil
	}
	return "", nil
}

// Usage is how full a file system is.
type Usage struct {
	TotalBytes, AvailableBytes, UsedBytes    int64
	TotalInodes, AvailableInodes, UsedInodes int64 // zero where the file system counts none
}

// Usage asks the mounted file system.
func (s *State) Usage() (Usage, error) { return UsageOf(s.file) }

// Usage asks the detached file system.
func (d *Detached) Usage() (Usage, error) { return UsageOf(d.mount) }

// UsageOf asks the file system that f is on.
func UsageOf(f *os.File) (Usage, error) {
	st, err := linux.Fstatfs(f)
	if err != nil {
		return Usage{}, err
	}
	bs := int64(st.BlockSize)
	return Usage{
		TotalBytes: int64(st.Blocks) * bs, AvailableBytes: int64(st.Available) * bs, UsedBytes: int64(st.Blocks-st.Free) * bs,
		TotalInodes: int64(st.Inodes), AvailableInodes: int64(st.InodesFree), UsedInodes: int64(st.Inodes - st.InodesFree),
	}, nil
}

// Dir opens the root directory of a mounted file system for reading.
func (s *State) Dir() (*os.File, error) {
	return linux.Openat(s.file, ".", os.O_RDONLY|linux.ODirectory, 0)
}
