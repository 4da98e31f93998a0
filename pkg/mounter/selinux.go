package mounter

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ErrLabelMismatch means that the kernel shows another SELinux label on a mount than requested.
var ErrLabelMismatch = errors.New("the SELinux label is not the one that was asked for")

// SELinux reports whether this kernel runs with SELinux. It tests for selinuxfs in
// /proc/filesystems, which needs no mount from the host. Other tests are not reliable: setting
// a security.selinux attribute works without SELinux too, and mount(2) fails with the same
// errno for a bad label.
func SELinux() Feature {
	f := Feature{Name: "SELinux", Since: "any, if it was started with it",
		Cost: "pods' SELinux labels have no effect, for the kubelet passes none on; a volume whose mountOptions have context= is refused"}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return f.answer(err)
	}
	if !slices.Contains(strings.Fields(string(b)), "selinuxfs") {
		f.Answer, f.Why = No, "the kernel was started without it"
		return f
	}
	return f.answer(nil)
}

// Context returns the label that the options request for all files of the file system, or "" if
// there is none.
func (o Options) Context() string { return o.value("context") }

func (o Options) value(key string) string {
	for _, opt := range o.Superblock {
		if opt.Key == key {
			return opt.Value
		}
	}
	return ""
}

// Labels reports whether an option sets an SELinux label.
func (o Options) Labels() bool {
	return slices.ContainsFunc(o.Superblock, func(opt Option) bool { return contextOptions[opt.Key] })
}

// CheckLabels refuses options with a label on a kernel without SELinux.
func CheckLabels(o Options) error {
	if !o.Labels() {
		return nil
	}
	if f := SELinux(); f.Answer == No {
		return fault.New(fault.State,
			"the mount options %q ask for a SELinux label, and this node's kernel runs without SELinux (%s): start "+
				"the kernel with it, or take seLinuxMount out of the CSIDriver", o.SuperblockString(), f.Why)
	}
	return nil
}

// verifyLabel compares the label that the kernel shows with the requested one.
func verifyLabel(o Options, shown func() (string, error)) error {
	want := o.Context()
	if want == "" {
		return nil
	}
	got, err := shown()
	if err != nil {
		return fmt.Errorf("read the SELinux label back: %w", err)
	}
	if !SameLabel(got, want) {
		return fault.New(fault.State, "%w: asked for %q, the kernel shows %q; nothing was mounted", ErrLabelMismatch, want, got)
	}
	return nil
}

// Label returns the SELinux label of the file system's root, or "" without SELinux.
func (d *Detached) Label() (string, error) {
	f, err := d.Dir()
	if err != nil {
		return "", err
	}
	defer f.Close()
	return labelOf(f)
}

// Label returns the SELinux label of the mounted root, or "" without SELinux.
func (s *State) Label() (string, error) {
	f, err := s.Dir()
	if err != nil {
		return "", err
	}
	defer f.Close()
	return labelOf(f)
}

func labelOf(f *os.File) (string, error) {
	dir, err := linux.OpenRootDir(f)
	if err != nil {
		return "", err
	}
	b, err := dir.Getxattr("security.selinux")
	if errors.Is(err, linux.EOPNOTSUPP) {
		b, err = nil, nil
	}
	return strings.TrimRight(string(b), "\x00"), errors.Join(err, dir.Close())
}

// SameLabel reports whether two labels are equivalent. The kernel sorts categories and merges
// them into ranges.
func SameLabel(a, b string) bool { return a == b || canonicalLabel(a) == canonicalLabel(b) }

// SameSuperblock reports whether text, from SuperblockString, means the same superblock
// options. It compares labels with SameLabel.
func (o Options) SameSuperblock(text string) bool {
	if o.SuperblockString() == text {
		return true
	}
	other, err := ParseOptions([]string{text})
	return err == nil && slices.EqualFunc(o.Superblock, other.Superblock, func(a, b Option) bool {
		return a == b || a.Key == b.Key && contextOptions[a.Key] && SameLabel(a.Value, b.Value)
	})
}

var categoryRange = regexp.MustCompile(`^c([0-9]{1,4})(?:\.c([0-9]{1,4}))?$`)

// canonicalLabel lists all categories one by one, sorted. It returns a label in any other
// syntax unchanged.
func canonicalLabel(label string) string {
	parts := strings.SplitN(label, ":", 4)
	if len(parts) < 4 {
		return label
	}
	levels := strings.Split(parts[3], "-")
	for i, level := range levels {
		sensitivity, categories, ok := strings.Cut(level, ":")
		if !ok {
			continue
		}
		var has [10_000]bool // up to four digits; a label may repeat a category
		for _, c := range strings.Split(categories, ",") {
			m := categoryRange.FindStringSubmatch(c)
			if m == nil {
				return label
			}
			first, _ := strconv.Atoi(m[1])
			last := first
			if m[2] != "" {
				last, _ = strconv.Atoi(m[2])
			}
			if last < first {
				return label
			}
			for n := first; n <= last; n++ {
				has[n] = true
			}
		}
		var all []string
		for n, yes := range has {
			if yes {
				all = append(all, fmt.Sprint("c", n))
			}
		}
		levels[i] = sensitivity + ":" + strings.Join(all, ",")
	}
	if len(levels) == 2 && levels[0] == levels[1] {
		levels = levels[:1]
	}
	parts[3] = strings.Join(levels, "-")
	return strings.Join(parts, ":")
}

// openClassic mounts with mount(2) at the scratch directory, makes a detached clone and
// unmounts again. btrfs accepts no SELinux label through the new calls before Linux 6.8.
func openClassic(fs Filesystem) (*Detached, error) {
	v := View{Options: fs.Options, ReadOnly: fs.ReadOnly}
	return throughScratch(fs.Scratch, fs.Type+" on "+fs.Device.Path, v, func(options []string) error {
		err := linux.Mount(fs.Device.Path, fs.Scratch, fs.Type, fs.Device.ReadOnly, strings.Join(options, ","))
		if err != nil {
			return fault.New(fault.State, "%s on %s with the options %q: %w (see dmesg)", fs.Type, fs.Device.Path,
				fs.Options.SuperblockString(), err)
		}
		return nil
	})
}
