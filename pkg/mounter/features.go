package mounter

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Answer is the result of probing a kernel feature.
type Answer int

// CannotTell is never No: dependent operations are tried, and fail with a clear error.
const (
	CannotTell Answer = iota
	No
	Yes
)

func (a Answer) String() string { return [...]string{"cannot tell", "no", "yes"}[a] }

// Feature is something in which kernels differ.
type Feature struct {
	Name   string
	Answer Answer
	Since  string // the first kernel version that has it
	Cost   string // the consequence of its absence
	Why    string // the reason for No or CannotTell
}

// Features probes this kernel. It tries each feature and ignores the kernel's version.
func Features() []Feature {
	list := []Feature{
		probeOpenat2(), probeFsopen(), probeMountSetattr(), probeStatmount(), probeCapability(), SELinux(),
	}
	for _, fs := range fstype.Formats() {
		list = append(list, ProbeFilesystem(fs))
	}
	return list
}

func (f Feature) answer(err error) Feature {
	switch {
	case err == nil:
		f.Answer = Yes
	case errors.Is(err, linux.ENOSYS), errors.Is(err, linux.ENODEV), errors.Is(err, linux.EOPNOTSUPP):
		f.Answer, f.Why = No, err.Error()
	default:
		f.Answer, f.Why = CannotTell, err.Error()
	}
	return f
}

func probeOpenat2() Feature {
	f := Feature{Name: "openat2", Since: "5.6", Cost: "no target path can be opened safely: the driver does not work"}
	dir, err := linux.Openat2(linux.CWD, "/", linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
	if err == nil {
		err = dir.Close()
	}
	return f.answer(err)
}

func probeFsopen() Feature {
	f := Feature{Name: "fsopen", Since: "5.2", Cost: "no file system can be mounted: the driver does not work"}
	ctx, err := linux.Fsopen("tmpfs")
	if err == nil {
		err = ctx.Close()
	}
	return f.answer(err)
}

func probeMountSetattr() Feature {
	f := Feature{Name: "mount_setattr", Since: "5.12", Cost: "no recursive read-only, no idmapped mounts"}
	return f.answer(linux.MountSetattrAvailable())
}

func probeStatmount() Feature {
	f := Feature{Name: "statmount", Since: "6.14 (with the mount's source)",
		Cost: "looking at a btrfs or nfs mount reads the whole mount table"}
	root, err := linux.Openat2(linux.CWD, "/", linux.OPath|linux.ODirectory, 0)
	if err != nil {
		return f.answer(err)
	}
	defer root.Close()
	st, err := linux.StatxFile(root)
	if err != nil {
		return f.answer(err)
	}
	if _, err := mountOf(st); err != nil {
		f.Answer, f.Why = No, err.Error()
		if errors.Is(err, linux.EPERM) {
			f.Answer = CannotTell // EPERM comes from a seccomp filter, not from the kernel
		}
		return f
	}
	return f.answer(nil)
}

func probeCapability() Feature {
	f := Feature{Name: "CAP_SYS_RESOURCE", Since: "any",
		Cost: "ext4 grows only while it is not mounted, with resize2fs when it is next staged"}
	ok, err := linux.HasCapability(linux.CapSysResource)
	if err == nil && !ok {
		f.Answer, f.Why = No, "this process does not hold it"
		return f
	}
	return f.answer(err)
}

// ProbeFilesystem tests support for a file system by opening a context of it with fsopen(2).
// That loads its module if there is one.
func ProbeFilesystem(fstype string) Feature {
	f := Feature{Name: "file system " + fstype, Since: "any", Cost: "volumes of that type cannot be mounted"}
	ctx, err := linux.Fsopen(fstype)
	if err == nil {
		err = ctx.Close()
	}
	return f.answer(err)
}

// Mountable lists the file systems of block devices that this kernel has built in, loaded or as
// a module. It loads none.
func Mountable() ([]string, error) {
	known := map[string]bool{}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 1 { // not "nodev"
			known[f[0]] = true
		}
	}
	b, err = os.ReadFile("/lib/modules/" + linux.Uname() + "/modules.alias")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "alias fs-"); ok {
			known[strings.Fields(name)[0]] = true
		}
	}
	var list []string
	for _, fs := range fstype.OnDevices() {
		if known[fs] {
			list = append(list, fs)
		}
	}
	return list, nil
}

// Summary formats the features in one line, for a log.
func Summary(list []Feature) string {
	parts := make([]string, len(list))
	for i, f := range list {
		parts[i] = f.Name + ": " + f.Answer.String()
		if f.Answer != Yes {
			parts[i] += fmt.Sprintf(" (%s; so: %s)", f.Why, f.Cost)
		}
	}
	return "kernel " + linux.Uname() + "; " + strings.Join(parts, "; ")
}

// IsRoot reports whether this process runs as root, which this package needs.
func IsRoot() bool { return os.Geteuid() == 0 }

// BootID returns the kernel's id of this boot of this machine.
func BootID() (string, error) {
	if id := bootID.Load(); id != nil {
		return *id, nil
	}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(b))
	bootID.Store(&id)
	return id, nil
}

var bootID atomic.Pointer[string] // cache of BootID; nil: not read yet
