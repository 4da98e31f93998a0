// Package fstype has a table of file systems with one row each. The rest of the project names
// no file system, except the detectors of pkg/mounter/superblock and the code that mounts NFS
// (test/documents verifies this).
//
// A new file system of block devices needs a row here and a detector there.
package fstype

import (
	"os"
	"slices"
	"strconv"
)

// Type is a row of the table. The zero value of each field means "no" or "unknown".
type Type struct {
	// Name is the name that users give and that a superblock is detected as.
	Name string
	// Driver is the kernel's name for the driver, if it differs from Name.
	Driver string
	// Like names the row whose Options apply.
	Like string
	// Share is set for network shares, which have no block device.
	Share bool

	// Options are the permitted superblock options: see table and Allowed.
	Options []string
	// Copy is the superblock option without which the kernel refuses to mount a copy beside its
	// origin.
	Copy string
	// Apart is the superblock option that keeps a labelled share separate. Otherwise two
	// volumes of one server would share a superblock or a session, and with it the label.
	Apart string
	// GroupByOption means that files have no owners on disk; the mount options set them: see
	// GroupOptions.
	GroupByOption bool
	// LabelByMount means that kernels before 6.8 accept an SELinux label only through mount(2).
	LabelByMount bool
	// Numberless means that stat(2) shows a device number that belongs to no device.
	Numberless bool
	// IdmapSince is the first kernel version that supports idmapped mounts of it.
	IdmapSince string
	// Panic tells where the superblock can ask the kernel to panic. The content of a volume
	// must not cause that.
	Panic *Panic
	// ErrorCount is the file in sysfs that tells how many errors the superblock recorded. %s stands
	// for the kernel's name of the device.
	ErrorCount string
	// InodeTables means that pkg/mounter/ownership can read its inode tables from the device.
	InodeTables bool

	// Head is the size in bytes of the start of the device that contains the first superblock.
	Head int64

	// Grow grows a mounted file system to the size of its device, in bytes. The file dir is
	// open on any directory of it. The function found reads size and block size from the
	// superblock, in bytes. It is nil if no kernel can do that.
	Grow func(dir *os.File, size int64, found func() (size, block int64, err error)) error
	// GrowthIsPrivileged means that Grow needs CAP_SYS_RESOURCE. Resize does not, but needs the
	// file system unmounted.
	GrowthIsPrivileged bool

	// The following fields are programs. The device is appended, unless noted otherwise.

	// Make makes the file system on a blank device and leaves the rest of the initialization to
	// the kernel. Whole is appended to initialize everything at once. Force makes it overwrite
	// existing content. The device must have at least Minimum bytes.
	Make, Whole []string
	Force       string
	Minimum     int64
	// Check checks an unmounted file system. It changes nothing, unless CopyMetadata is set.
	Check []string
	// CopyMetadata copies a device's metadata into a file, whose path is appended after the device.
	// It is set if Check makes the repairs that need no decision. Such a check runs on the copy
	// first, and its exit statuses are those of fsck(8).
	CopyMetadata []string
	// Look is the check that changes nothing, for people.
	Look []string
	// NewID gives it a new identity, so that a copy can be mounted beside its origin.
	NewID []string
	// Resize grows it to the size of its device while it is unmounted. Check with Fully appended
	// must run first. Fully is empty if Check trusts no mark of a clean unmount.
	Resize, Fully []string
	// Replayed means that Resize does not replay the log of a file system that was not unmounted. It
	// refuses, or loses what was synced last. A mount before it replays the log.
	Replayed bool
	// Package is the Debian package with all of these programs.
	Package string
}

// Panic says how a superblock may ask for a panic: by a two-byte, little-endian number, or by mount options of its own.
type Panic struct {
	At    int64 // offset of the number in bytes from the device's start
	Value uint16
	// Options is the offset of the first byte of such options, which is 0 if there are none.
	Options int64
	// Unless is the mount option that overrides it, and Calm the value of that option for "no
	// panic".
	Unless, Calm string
}

// Of returns the row of a file system. For an unknown one it returns a row with only the name.
func Of(name string) Type {
	if i := slices.IndexFunc(table, func(t Type) bool { return t.Name == name }); i >= 0 {
		return table[i]
	}
	return Type{Name: name}
}

// Grows reports whether a way is known to grow it, mounted or not, by which no data is lost.
func (t Type) Grows() bool { return t.Grow != nil || len(t.Resize) > 0 }

// Allowed returns the permitted superblock options.
func (t Type) Allowed() []string {
	if t.Like != "" {
		return Of(t.Like).Options
	}
	return t.Options
}

// All returns the rows. The caller must not change them.
func All() []Type { return table }

// programs returns the fields that are programs.
func (t Type) programs() [][]string {
	return [][]string{t.Make, t.Check, t.CopyMetadata, t.Look, t.NewID, t.Resize}
}

// PackageOf returns the Debian package of a program, or "" if no row names it.
func PackageOf(program string) string {
	for _, t := range table {
		for _, argv := range t.programs() {
			if len(argv) > 0 && argv[0] == program {
				return t.Package
			}
		}
	}
	return ""
}

// Programs lists the programs of all rows, sorted.
func Programs() []string {
	var list []string
	for _, t := range table {
		for _, argv := range t.programs() {
			list = append(list, argv[:min(1, len(argv))]...)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// Formats lists the file systems that can be made, the default first.
func Formats() []string { return names(func(t Type) bool { return len(t.Make) > 0 }) }

// Default is the file system of a volume that requests none.
func Default() string { return Formats()[0] }

// LargestMinimum returns the size in bytes of a device on which each of Formats can be made.
func LargestMinimum() int64 {
	var most int64
	for _, t := range table {
		most = max(most, t.Minimum)
	}
	return most
}

// GroupOptions returns the mount options by which a file system with GroupByOption gives all its
// files to a group, and lets nobody else read them. The first option names the group.
func GroupOptions(gid uint32) []string {
	return []string{"gid=" + strconv.FormatUint(uint64(gid), 10), "fmask=0117", "dmask=0007"}
}

// OnDevices lists the file systems of block devices that have no Driver in their row: the
// kernel drivers worth reporting.
func OnDevices() []string {
	return names(func(t Type) bool { return !t.Share && t.Driver == "" })
}

// WithGroupOption lists those with GroupByOption that have no Driver in their row.
func WithGroupOption() []string {
	return names(func(t Type) bool { return t.GroupByOption && t.Driver == "" })
}

func names(which func(Type) bool) []string {
	var list []string
	for _, t := range table {
		if which(t) {
			list = append(list, t.Name)
		}
	}
	return list
}

// Kernel returns the name of the kernel's driver for a file system.
func Kernel(name string) string {
	if d := Of(name).Driver; d != "" {
		return d
	}
	return name
}
