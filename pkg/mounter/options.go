package mounter

import (
	"regexp"
	"slices"
	"sort"
	"strings"
	"unicode/utf8"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Options are mount options. They are divided into those of the superblock (shared by all
// mounts of a device) and those of each mount.
type Options struct {
	// Superblock holds the file system's own options, sorted. Value is empty for an option
	// without a value.
	Superblock []Option

	given    []string // all options, as written
	set, clr uint64   // mount_setattr(2) attributes
	readOnly *bool    // set by "ro" or "rw"
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

// mountAttrs are the options of mount(8) that apply to a single mount.
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

// contextOptions take an SELinux label as value; its categories contain commas.
var contextOptions = map[string]bool{"context": true, "fscontext": true, "defcontext": true, "rootcontext": true}

// category matches what may follow a comma in a label. The level that it ends may be the lower
// one of a range: s0:c1,c2-s0:c1,c2,c3.
var category = regexp.MustCompile(`^c[0-9]+(\.c[0-9]+)?([:-].*)?$`)

// ParseOptions parses the mount flags of a StorageClass or PersistentVolume: each string has
// one or more comma-separated options. It refuses (fault.Invalid) what is contradictory or
// meaningless: an empty name, a value for an option that takes none, "ro" with "rw" or "discard"
// with "nodiscard", one key with two values, and options that name another operation ("bind",
// "remount" and similar). The kernel refuses options that the file system does not support, at mount time. CheckOptions decides
// what is safe.
//
// A comma in a value is an error too, except in an SELinux label. mount(2), mount(8) and guests
// split options at commas, so the rest of the value would become an unchecked option.
func ParseOptions(flags []string) (Options, error) {
	var o Options
	said := map[uint64]string{}
	keys := map[string]string{}
	for _, flag := range flags {
		if !utf8.ValidString(flag) {
			return Options{}, fault.New(fault.Invalid, "mount option %q is not UTF-8", flag)
		}
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
				return Options{}, fault.New(fault.Invalid,
					"mount option %q has a comma in its value, which only the categories of a SELinux label may", piece)
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
				if hasValue {
					return Options{}, fault.New(fault.Invalid, "mount option %q takes no value", key)
				}
				continue
			case "ro", "rw":
				if ro := key == "ro"; o.readOnly != nil && *o.readOnly != ro {
					return Options{}, fault.New(fault.Invalid, `mount options "ro" and "rw" contradict each other`)
				} else if !hasValue {
					o.readOnly = &ro
					continue
				}
				return Options{}, fault.New(fault.Invalid, "mount option %q takes no value", key)
			case "bind", "rbind", "remount", "move", "shared", "rshared", "slave", "rslave", "private", "rprivate",
				"unbindable", "runbindable", "loop", "offset", "sizelimit":
				return Options{}, fault.New(fault.Invalid,
					"mount option %q names an operation that the driver does itself; take it out of mountOptions", key)
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
	for key := range keys {
		if _, ok := keys["no"+key]; ok { // the kernel would take whichever comes last
			return Options{}, fault.New(fault.Invalid, "mount options %q and %q contradict each other", key, "no"+key)
		}
	}
	sort.Slice(o.Superblock, func(i, j int) bool { return o.Superblock[i].Key < o.Superblock[j].Key })
	return o, nil
}

// splitOptions splits at commas outside of double quotes and outside of the categories of an
// SELinux label, and removes the quotes.
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

// List returns each option once, in the order given.
func (o Options) List() []string { return slices.Clone(o.given) }

// ReadOnly reports whether "ro" was given.
func (o Options) ReadOnly() bool { return o.readOnly != nil && *o.readOnly }

// ReadWrite reports whether "rw" was given.
func (o Options) ReadWrite() bool { return o.readOnly != nil && !*o.readOnly }

// SuperblockString returns the superblock options as comma-separated text, for comparing and
// for people. It keeps a comma inside a value.
func (o Options) SuperblockString() string {
	parts := make([]string, len(o.Superblock))
	for i, opt := range o.Superblock {
		parts[i] = opt.String()
	}
	return strings.Join(parts, ",")
}

// With adds a superblock option, unless its key is present. List has it, too.
func (o Options) With(key, value string) Options {
	for _, opt := range o.Superblock {
		if opt.Key == key {
			return o
		}
	}
	added := Option{key, value}
	o.given = append(slices.Clone(o.given), added.String())
	o.Superblock = append(slices.Clone(o.Superblock), added)
	sort.Slice(o.Superblock, func(i, j int) bool { return o.Superblock[i].Key < o.Superblock[j].Key })
	return o
}

// WithGroup adds the options by which a file system without owners on disk (fstype.Type.GroupByOption) gives all its files to a group.
// Options that name another group are a fault Invalid.
func (o Options) WithGroup(gid uint32) (Options, error) {
	for i, option := range fstype.GroupOptions(gid) {
		key, value, _ := strings.Cut(option, "=")
		o = o.With(key, value)
		if i == 0 && !slices.Contains(o.Superblock, Option{key, value}) {
			return o, fault.New(fault.Invalid, "the pod's fsGroup is %d, and the mount options say %q", gid, o.SuperblockString())
		}
	}
	return o, nil
}

// attrs returns the attributes for mount_setattr(2), to set and to clear.
func (o Options) attrs(readOnly bool) (set, clr uint64) {
	set, clr = o.set, o.clr
	if readOnly || o.ReadOnly() {
		set |= linux.MountAttrRdonly
	}
	return set, clr
}

// statfsFlags returns the flags that fstatfs(2) shows for a mount with these options, and the
// mask of those that can be compared.
func (o Options) statfsFlags(readOnly bool) (want, mask int64) {
	set, _ := o.attrs(readOnly)
	mask = linux.StRdonly | linux.StNosuid | linux.StNodev | linux.StNoexec | linux.StNoatime | linux.StNodiratime | linux.StRelatime |
		linux.StNosymfollow
	for bit, st := range map[uint64]int64{
		linux.MountAttrRdonly: linux.StRdonly, linux.MountAttrNosuid: linux.StNosuid,
		linux.MountAttrNodev: linux.StNodev, linux.MountAttrNoexec: linux.StNoexec,
		linux.MountAttrNodiratime: linux.StNodiratime, linux.MountAttrNosymfollow: linux.StNosymfollow,
	} {
		if set&bit != 0 {
			want |= st
		}
	}
	switch set & linux.MountAttrAtimeMask {
	case linux.MountAttrNoatime:
		want |= linux.StNoatime
	case linux.MountAttrStrictatime: // neither flag
	default:
		want |= linux.StRelatime
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
		{linux.StNodiratime, "nodiratime"}, {linux.StRelatime, "relatime"}, {linux.StNosymfollow, "nosymfollow"}} {
		if flags&f.bit != 0 {
			parts = append(parts, f.name)
		}
	}
	return strings.Join(parts, ",")
}
