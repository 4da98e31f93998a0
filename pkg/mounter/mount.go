package mounter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Mount is one mount as the kernel reports it.
type Mount struct {
	Path         string // the mount point, as seen from this process; only from Table
	Type         string // of the file system
	Source       string
	Part         bool   // only from Table: a part of a file system is bound there, such as one file
	Options      string // of the superblock, comma-separated
	ReadOnly     bool   // by the mount or by the superblock
	ReadOnlySB   bool   // by the superblock
	Major, Minor uint32 // of the superblock: the block device for ext4 and xfs
}

// mountOf asks the kernel about a mount with statmount(2). It fails with errNoStatmount if
// statmount does not report everything (before Linux 6.14); mountinfo has it then.
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

// root returns the root of what is mounted. If nothing is mounted, the directory there belongs
// to the node, so that is a fault.State.
func (s *State) root() (*os.File, error) {
	if s.Occupant != MountPoint || s.file == nil {
		return nil, fault.New(fault.State, "nothing is mounted there")
	}
	return s.file, nil
}

// Mount returns the mount at a target whose Occupant is MountPoint.
func (s *State) Mount() (Mount, error) {
	root, err := s.root()
	if err != nil {
		return Mount{}, err
	}
	m, err := mountOf(s.stat)
	if err == nil {
		return m, nil
	}
	// mountinfo has the classic mount id.
	id, err := classicMountID(root)
	if err != nil {
		return Mount{}, err
	}
	return mountByID(root, id)
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

// Table reads all mounts in this process's namespace whose mount point is below the root. Its
// cost grows with the number of all mounts: use it at the start of a program, never in a call.
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

// Device returns the block device of a mount point: the one its file system is on, or the one
// whose node is bound there. If there is neither, ok is false. Path is the device's node in /dev,
// and empty if /dev has none with its number, as in a container with a /dev of its own: compare
// with Device.Same. ReadOnly is not examined: FindDevice does that.
func (s *State) Device() (d Device, ok bool, err error) {
	switch {
	case s.Occupant != MountPoint:
		return Device{}, false, nil
	case s.stat.IsBlock():
		return numbered(s.stat.RdevMajor, s.stat.RdevMinor), true, nil
	case s.stat.DevMajor != 0:
		return numbered(s.stat.DevMajor, s.stat.DevMinor), true, nil
	}
	// btrfs has an anonymous device number; its source names the device.
	m, err := s.Mount()
	if err != nil {
		return Device{}, false, err
	}
	return m.Device()
}

func numbered(major, minor uint32) Device {
	return Device{Path: nodeOf("/sys", "/dev", major, minor), Major: major, Minor: minor}
}

// nodeOf returns the path of a device's node in the directory dev, or "" if no node there has its
// number.
func nodeOf(sys, dev string, major, minor uint32) string {
	link, err := os.Readlink(fmt.Sprintf("%s/dev/block/%d:%d", sys, major, minor))
	if err != nil {
		return ""
	}
	// sysfs shows a "/" in a device's name as "!".
	path := filepath.Join(dev, strings.ReplaceAll(filepath.Base(link), "!", "/"))
	if st, err := linux.StatxPath(path); err != nil || !st.IsBlock() || st.RdevMajor != major || st.RdevMinor != minor {
		return ""
	}
	return path
}

// Group returns the group that owns the root of what is mounted, as processes see it: after the
// mount's id map, if it has one.
func (s *State) Group() uint32 { return s.stat.GID }

// IsBlock reports whether a block device node is bound there.
func (s *State) IsBlock() bool { return s.stat.IsBlock() }

// Device returns the block device that the mount's file system is on, or whose node it shows.
// It fails if the file system reports only a path and that path does not exist, as for a disk
// that was pulled.
func (m Mount) Device() (Device, bool, error) {
	if m.Part {
		// A bound device node, of devtmpfs or of any other file system. The path leads to it.
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
		return Device{Path: m.Source}, false,
			fmt.Errorf("%s is mounted at %s, and which device that is cannot be told: %w", m.Source, m.Path, err)
	}
	return Device{Path: m.Source, Major: st.RdevMajor, Minor: st.RdevMinor}, st.IsBlock(), nil
}

// Same reports whether both have the same device number.
func (d Device) Same(o Device) bool { return d.Major == o.Major && d.Minor == o.Minor }

// Differs compares what is mounted with fs: the device, and the per-mount options ro, nosuid, nodev, noexec, nosymfollow and those
// about atime. It returns ""
// if they agree, otherwise a description of both. It does not compare superblock options,
// because the kernel does not report all of them, and not the source of a network share: compare
// that with Mount. A device without its numbers is a fault Invalid ([FindDevice] finds them).
func (s *State) Differs(fs Filesystem) (string, error) {
	root, err := s.root()
	if err != nil {
		return "", err
	}
	if s.IsBlock() {
		return "a block device is there, a file system was asked for", nil
	}
	if share := fstype.Of(fs.Type).Share; !share && fs.Device.Major == 0 {
		return "", fault.New(fault.Invalid, "device %q has no numbers to compare with what is mounted", fs.Device.Path)
	} else if !share {
		have, ok, err := s.Device()
		if err != nil {
			return "", err
		}
		if !ok || !have.Same(fs.Device) {
			return fmt.Sprintf("another device is mounted there (%d:%d), asked for %s (%d:%d)", have.Major, have.Minor, fs.Device.Path,
				fs.Device.Major, fs.Device.Minor), nil
		}
	}
	st, err := linux.Fstatfs(root)
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
	TotalInodes, AvailableInodes, UsedInodes int64 // zero if the file system does not count inodes
}

// Usage returns the usage of the mounted file system.
func (s *State) Usage() (Usage, error) {
	root, err := s.root()
	if err != nil {
		return Usage{}, err
	}
	return UsageOf(root)
}

// Usage returns the usage of the detached file system.
func (d *Detached) Usage() (Usage, error) { return UsageOf(d.mount) }

// UsageOf returns the usage of the file system that f is on.
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

// Dir opens the root directory of a mounted file system for reading. The caller must close it: an
// open directory keeps the file system in use.
func (s *State) Dir() (*os.File, error) {
	root, err := s.root()
	if err != nil {
		return nil, err
	}
	return linux.Openat(root, ".", os.O_RDONLY|linux.ODirectory, 0)
}
