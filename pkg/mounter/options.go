package mounter

import (
	"regexp"
	"slices"
	"sort"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Options are mount options, divided into what belongs to the superblock (one
// value for all mounts of a device) and what belongs to each mount.
type Options struct {
	// Superblock holds the file system's own options, sorted. An option
	// without a value has an empty Value.
	Superblock []Option

	given    []string // all of them, as they were written
	set, clr uint64   // mount_setattr(2) attributes
	readOnly *bool    // "ro" or "rw" was among them
}

// Option is one option of a file system.
type Option struct{ Key, Value string }

func (o Option) String() string {
	if o.Value == "" {
		return o.Key
	}
	return o.Key + "=" + o.Value
}

type attr struct {
	bits, mask uint64
	set        bool
}

// mountAttrs are the options of mount(8) that belong to a mount.
var mountAttrs = map[string]attr{
	"nosuid":      {linux.MountAttrNosuid, linux.MountAttrNosuid, true},
	"suid":        {linux.MountAttrNosuid, linux.MountAttrNosuid, false},
	"nodev":       {linux.MountAttrNodev, linux.MountAttrNodev, true},
	"dev":         {linux.MountAttrNodev, linux.MountAttrNodev, false},
	"noexec":      {linux.MountAttrNoexec, linux.MountAttrNoexec, true},
	"exec":        {linux.MountAttrNoexec, linux.MountAttrNoexec, false},
	"nodiratime":  {linux.MountAttrNodiratime, linux.MountAttrNodiratime, true},
	"diratime":    {linux.MountAttrNodiratime, linux.MountAttrNodiratime, false},
	"nosymfollow": {linux.MountAttrNosymfollow, linux.MountAttrNosymfollow, true},
	"symfollow":   {linux.MountAttrNosymfollow, linux.MountAttrNosymfollow, false},
	"relatime":    {linux.MountAttrRelatime, linux.MountAttrAtimeMask, true},
	"noatime":     {linux.MountAttrNoatime, linux.MountAttrAtimeMask, true},
	"atime":       {linux.MountAttrRelatime, linux.MountAttrAtimeMask, true},
	"strictatime": {linux.MountAttrStrictatime, linux.MountAttrAtimeMask, true},
}

// contextOptions take a SELinux label, whose categories contain commas.
var contextOptions = map[string]bool{"context": true, "fscontext": true, "defcontext": true, "rootcontext": true}

// category is what may follow a comma in a label; the level that it ends may be the
// lower one of two: s0:c1,c2-s0:c1,c2,c3.
var category = regexp.MustCompile(`^c[0-9]+(\.c[0-9]+)?([:-].*)?$`)

// ParseOptions reads mount flags as a StorageClass or a PersistentVolume gives
// them: one or more options, comma-separated, in each string. Options the
// file system does not know are found by the kernel when it is mounted; what
// is an error here is what contradicts itself or has no meaning: an empty
// name, a value for an option that takes none, "ro" with "rw", one key with
// two values, and the options "bind", "remount" and the like that name another
// operation. A comma in a value is an error too, except in a SELinux label:
// mount(2), mount(8) and guests take options apart at commas, so the rest of the
// value would be an option that nobody has looked at.
func ParseOptions(flags []string) (Options, error) {
	var o Options
	said := map[uint64]string{}
	keys := map[string]string{}
	for _, flag := range flags {
		pieces, err := splitOptions(flag)
		if err != nil {
			return Options{}, err
		}
		for _, piece := range pieces {
			key, value, hasValue := strings.Cut(piece, "=")
			if key == "" || strings.ContainsAny(piece, "\x00\n") {
				return Options{}, fault.New(fault.Invalid, "mount option %q has no name or contains control characters", piece)
			}
			if parts, err := splitOptions(piece); err != nil || len(parts) != 1 || parts[0] != piece {
				return Options{}, fault.New(fault.Invalid, "mount option %q has a comma in its value, which only the categories of a SELinux label may",
					piece)
			}
			if !slices.Contains(o.given, piece) {
				o.given = append(o.given, piece)
			}
			if a, ok := mountAttrs[key]; ok {
				if hasValue {
					return Options{}, fault.New(fault.Invalid, "mount option %q takes no value", key)
				}
				if before, ok := said[a.mask]; ok && before != key {
					return Options{}, fault.New(fault.Invalid, "mount options %q and %q contradict each other", before, key)
				}
				said[a.mask] = key
				o.clr |= a.mask
				if a.set {
					o.set |= a.bits
				}
				continue
			}
			switch key {
			case "defaults":
				continue
			case "ro", "rw":
				if ro := key == "ro"; o.readOnly != nil && *o.readOnly != ro {
					return Options{}, fault.New(fault.Invalid, `mount options "ro" and "rw" contradict each other`)
				} else if !hasValue {
					o.readOnly = &ro
					continue
				}
				return Options{}, fault.New(fault.Invalid, "mount option %q takes no value", key)
			case "bind", "rbind", "remount", "move", "shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable",
				"loop", "offset", "sizelimit":
				return Options{}, fault.New(fault.Invalid, "mount option %q names an operation that the driver does itself; take it out of mountOptions", key)
			case "source":
				return Options{}, fault.New(fault.Invalid, `mount option "source" cannot be given: the driver chooses the device`)
			}
			if hasValue && value == "" {
				return Options{}, fault.New(fault.Invalid, "mount option %q has an empty value", key)
			}
			if before, ok := keys[key]; ok {
				if before != value {
					return Options{}, fault.New(fault.Invalid, "mount option %q is given twice, as %q and %q", key, before, value)
				}
				continue
			}
			keys[key] = value
			o.Superblock = append(o.Superblock, Option{key, value})
		}
	}
	sort.Slice(o.Superblock, func(i, j int) bool { return o.Superblock[i].Key < o.Superblock[j].Key })
	return o, nil
}

// splitOptions splits at commas that are neither in double quotes nor inside
// the categories of a SELinux label, and takes the quotes off.
func splitOptions(s string) ([]string, error) {
	var out []string
	var cur strings.Builder
	quoted := false
	flush := func() {
		piece := strings.TrimSpace(cur.String())
		cur.Reset()
		if piece == "" {
			return
		}
		if n := len(out); n > 0 && category.MatchString(piece) {
			if key, value, ok := strings.Cut(out[n-1], "="); ok && contextOptions[key] && strings.Count(value, ":") >= 3 {
				out[n-1] += "," + piece
				return
			}
		}
		out = append(out, piece)
	}
	for _, c := range s {
		switch {
		case c == '"':
			quoted = !quoted
		case c == ',' && !quoted:
			flush()
		default:
			cur.WriteRune(c)
		}
	}
	if quoted {
		return nil, fault.New(fault.Invalid, "mount options %q: a quotation mark is not closed", s)
	}
	flush()
	return out, nil
}

// List gives all options, one in each string, each once, in the order in which
// they were given.
func (o Options) List() []string { return slices.Clone(o.given) }

// ReadOnly tells whether "ro" was among the options.
func (o Options) ReadOnly() bool { return o.readOnly != nil && *o.readOnly }

// ReadWrite tells whether "rw" was among the options.
func (o Options) ReadWrite() bool { return o.readOnly != nil && !*o.readOnly }

// SuperblockString is the superblock's options as one comma-separated text,
// for comparing and for people. A comma inside a value is kept.
func (o Options) SuperblockString() string {
	parts := make([]string, len(o.Superblock))
	for i, opt := range o.Superblock {
		parts[i] = opt.String()
	}
	return strings.Join(parts, ",")
}

// With adds a superblock option unless its key is there.
func (o Options) With(key, value string) Options {
	for _, opt := range o.Superblock {
		if opt.Key == key {
			return o
		}
	}
	o.Superblock = append(append([]Option{}, o.Superblock...), Option{key, value})
	sort.Slice(o.Superblock, func(i, j int) bool { return o.Superblock[i].Key < o.Superblock[j].Key })
	return o
}

// attrs gives mount_setattr's bits for these options and read-only-ness.
func (o Options) attrs(readOnly bool) (set, clr uint64) {
	set, clr = o.set, o.clr
	if readOnly || o.ReadOnly() {
		set |= linux.MountAttrRdonly
	}
	return set, clr
}

// statfsFlags gives the flags that fstatfs(2) shows on a mount with these
// options, and the mask of those that can be compared.
func (o Options) statfsFlags(readOnly bool) (want, mask int64) {
	set, _ := o.attrs(readOnly)
	mask = linux.StRdonly | linux.StNosuid | linux.StNodev | linux.StNoexec | linux.StNoatime | linux.StNodiratime
	for bit, st := range map[uint64]int64{
		linux.MountAttrRdonly: linux.StRdonly, linux.MountAttrNosuid: linux.StNosuid,
		linux.MountAttrNodev: linux.StNodev, linux.MountAttrNoexec: linux.StNoexec,
		linux.MountAttrNodiratime: linux.StNodiratime,
	} {
		if set&bit != 0 {
			want |= st
		}
	}
	if set&linux.MountAttrAtimeMask == linux.MountAttrNoatime {
		want |= linux.StNoatime
	}
	return want, mask
}

func describeFlags(flags int64) string {
	parts := []string{"rw"}
	if flags&linux.StRdonly != 0 {
		parts[0] = "ro"
	}
	for _, f := range []struct {
		bit  int64
		name string
	}{{linux.StNosuid, "nosuid"}, {linux.StNodev, "nodev"}, {linux.StNoexec, "noexec"}, {linux.StNoatime, "noatime"},
		{linux.StNodiratime, "nodiratime"}} {
		if flags&f.bit != 0 {
			parts = append(parts, f.name)
		}
	}
	return strings.Join(parts, ",")
}
