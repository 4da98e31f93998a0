// Package fstype is what is known of file systems, a row each. Nothing else in the
// project names one, but for the detectors of pkg/mounter/superblock and what mounts NFS
// (test/documents looks).
//
// A new file system of block devices is a row here and a detector there.
package fstype

import (
	"os"
	"slices"
)

// Type is a row. Of its fields, the zero value is always "no" or "not known".
type Type struct {
	// Name is what users call it, and what a superblock is found to be.
	Name string
	// Driver is the kernel's name for what mounts it, where that is another.
	Driver string
	// Like names the row whose Options it has.
	Like string
	// Share tells that it is of a server, not of a block device.
	Share bool

	// Options are the superblock options that may be asked for: see table, and Allowed.
	Options []string
	// Copy is a superblock option without which the kernel refuses a copy beside its origin.
	Copy string
	// Apart is a superblock option that keeps a labelled share apart: else two volumes of
	// one server would share a superblock, or a session, and its label.
	Apart string
	// GroupByOption tells that files have no owners on disk: the mount says whose they are.
	GroupByOption bool
	// LabelByMount tells that kernels before 6.8 take an SELinux label by mount(2) only.
	LabelByMount bool
	// Numberless tells that stat(2) gives its files a device number of no device.
	Numberless bool
	// IdmapSince is the first kernel that makes idmapped mounts of it.
	IdmapSince string
	// Panic is where a superblock can ask for a panic of the kernel, which a volume's
	// content must not.
	Panic *Panic
	// InodeTables tells that pkg/mounter/ownership reads its inode tables from the device.
	InodeTables bool

	// Head is how many bytes from the device's start hold its first superblock.
	Head int64

	// Grow makes a mounted one as large as its device, in bytes. dir is open on any
	// directory of it; found reads what its superblock says, in bytes.
	Grow func(dir *os.File, size int64, found func() (size, block int64, err error)) error
	// GrowthIsPrivileged tells that Grow needs CAP_SYS_RESOURCE, and that Resize does it
	// without, while it is not mounted.
	GrowthIsPrivileged bool

	// What follows are programs. Where nothing else is said, the device is appended.

	// Make makes one on a blank device, leaving to the kernel what can wait; Whole is
	// added where nothing may wait; Force makes it overwrite what is there. It fits on
	// no less than Minimum bytes.
	Make, Whole []string
	Force       string
	Minimum     int64
	// Check looks at one that is not mounted. It changes nothing, unless Preen.
	Check []string
	// Preen tells that Check repairs what is safe without asking, as e2fsck -p.
	Preen bool
	// Look is the Check that changes nothing, for people.
	Look []string
	// NewID gives another identity, so that a copy can be mounted beside its origin.
	NewID []string
	// Resize grows it to its device; Check with -f goes before it.
	Resize []string
	// Package is Debian's that has all of them, and Others, which they call.
	Package string
	Others  []string
}

// Panic is a number of two bytes, little endian, in a superblock.
type Panic struct {
	At    int64 // bytes from the device's start
	Value uint16
	// Unless is the option with which the mount decides, and Calm its value for "no panic".
	Unless, Calm string
}

// Of gives the row of a file system; of one that is not known, a row with its name only.
func Of(name string) Type {
	if i := slices.IndexFunc(table, func(t Type) bool { return t.Name == name }); i >= 0 {
		return table[i]
	}
	return Type{Name: name}
}

// Allowed are the superblock options that may be asked for.
func (t Type) Allowed() []string {
	if t.Like != "" {
		return Of(t.Like).Options
	}
	return t.Options
}

// All gives the rows. The caller must not change them.
func All() []Type { return table }

// PackageOf is Debian's package that has a program; empty if no row names it.
func PackageOf(program string) string {
	for _, t := range table {
		if slices.Contains(t.Others, program) {
			return t.Package
		}
		for _, argv := range [][]string{t.Make, t.Check, t.Look, t.NewID, t.Resize} {
			if len(argv) > 0 && argv[0] == program {
				return t.Package
			}
		}
	}
	return ""
}

// Programs lists the programs of all rows.
func Programs() []string {
	var list []string
	for _, t := range table {
		list = append(list, t.Others...)
		for _, argv := range [][]string{t.Make, t.Check, t.Look, t.NewID, t.Resize} {
			list = append(list, argv[:min(1, len(argv))]...)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// Formats lists the file systems that can be made, the default first.
func Formats() []string { return names(func(t Type) bool { return len(t.Make) > 0 }) }

// Default is the file system of a volume for which none was asked.
func Default() string { return Formats()[0] }

// OnDevices are the names of kernel drivers for block devices that are worth a word.
func OnDevices() []string {
	return names(func(t Type) bool { return !t.Share && t.Driver == "" })
}

// WithGroupOption lists those with GroupByOption that have a driver of their own.
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

// Kernel is the name of the kernel's driver for a file system.
func Kernel(name string) string {
	if d := Of(name).Driver; d != "" {
		return d
	}
	return name
}
