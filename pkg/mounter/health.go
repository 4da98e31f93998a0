package mounter

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Ailment is a problem of a volume.
type Ailment struct {
	Reason  string // CamelCase
	Message string
	Fatal   bool // the volume cannot be used
	// Informational means that nothing is wrong, but somebody may want to know.
	Informational bool
	Lost          bool // data was lost
}

// WritesLost syncs a mounted file system. It returns ErrNotWritten if writes have failed since
// it was mounted and the kernel has not reported that yet.
func (s *State) WritesLost() error {
	dir, err := s.Dir()
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := linux.Syncfs(dir); err != nil {
		return fmt.Errorf("%w: %w", ErrNotWritten, err)
	}
	return nil
}

// DeviceHealth examines a block device and its entries in sysfs.
func DeviceHealth(d Device) []Ailment {
	if d.Path == "" {
		return nil // there is no node to ask
	}
	size, err := DeviceSize(d)
	if linux.Short(err) {
		return nil // that is about this process
	}
	if err != nil {
		return []Ailment{{Reason: "DeviceGone", Message: fmt.Sprintf("%s cannot be opened: %v", d.Path, err), Fatal: true}}
	}
	if size == 0 {
		return []Ailment{{Reason: "DeviceGone", Message: d.Path + " has no medium: its size is 0", Fatal: true}}
	}
	var found []Ailment
	if err := answers(d); err != nil {
		found = append(found, Ailment{Reason: "DeviceUnreadable",
			Message: fmt.Sprintf("%s cannot be read: %v (see dmesg)", d.Path, err), Fatal: true})
	}
	if b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file", d.Major, d.Minor)); err == nil {
		if name := strings.TrimSpace(string(b)); strings.HasSuffix(name, " (deleted)") {
			found = append(found, Ailment{Reason: "BackingFileDeleted",
				Message: name + ": the data is lost when the volume is unmounted; copy it now", Fatal: true})
		}
	}
	return found
}

// answers reads one block of the device itself. A file system can work from memory long after
// its disk has failed.
func answers(d Device) error {
	f, err := linux.Open(d.Path, os.O_RDONLY|linux.ODirect)
	if errors.Is(err, linux.EINVAL) || linux.Short(err) {
		return nil // no direct I/O, or no descriptor, so the disk cannot be tested
	}
	if err != nil {
		return err
	}
	defer f.Close()
	block := linux.AlignedBuffer(linux.DirectAlign)
	_, err = linux.Pread(f, block, 0)
	if err != nil {
		// A direct read first writes what is in memory. The first reader after a write that failed gets the error of that write.
		_, err = linux.Pread(f, block, 0)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, linux.EINVAL) {
		return nil
	}
	return err
}

// Ailments examines a mounted file system: the errors it recorded, and whether it went
// read-only by itself.
func (s *State) Ailments(d Device) []Ailment {
	var found []Ailment
	m, err := s.Mount()
	if err != nil {
		return []Ailment{{Reason: "MountUnreadable", Message: err.Error()}}
	}
	_, err = linux.Fstatfs(s.file)
	if err == nil {
		err = s.dead
	}
	if err != nil {
		found = append(found, Ailment{Reason: "FilesystemShutDown",
			Message: fmt.Sprintf("%s on %s does not answer: %v (see dmesg)", m.Type, d.Path, err), Fatal: true})
	}
	stopped := (m.ReadOnlySB && !d.ReadOnly) || hasOption(m.Options, "emergency_ro") || hasOption(m.Options, "shutdown")
	if n := recordedErrors(m.Type, d); n > 0 {
		// Some stable kernels (6.1.192 among them) refuse writes without showing it in the
		// mount table.
		stopped = stopped || hasOption(m.Options, "errors=remount-ro")
		found = append(found, Ailment{Reason: "FilesystemError",
			Message: fmt.Sprintf("%s on %s recorded %d errors (see dmesg): stop the "+
				"pods, so that the volume can be checked when it is next staged", m.Type, d.Path, n)})
	}
	if stopped {
		found = append(found, Ailment{Reason: "RemountedReadOnly",
			Message: fmt.Sprintf("%s on %s stopped taking writes because of errors (see dmesg)", m.Type, d.Path), Fatal: true})
	}
	return found
}

// recordedErrors returns the number of errors in the superblock, or 0 if no file tells it.
func recordedErrors(fs string, d Device) int {
	file := fstype.Of(fs).ErrorCount
	name, err := sysName(d)
	if file == "" || err != nil {
		return 0
	}
	b, err := os.ReadFile(fmt.Sprintf(file, name))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return n
}

// sysName returns the kernel's name of the device, such as "loop3".
func sysName(d Device) (string, error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", d.Major, d.Minor))
	return filepath.Base(link), err
}

// HeldBy formats Holders for an error message, as a sentence of its own. It is empty if there are
// none, so append it with [fault.Private.After]. The locations are in Detail, for the log: readers
// of an event must not see the paths and processes of other pods.
func HeldBy(d Device) fault.Private { return heldBy(Holders(d)) }

func heldBy(who []string) fault.Private {
	switch len(who) {
	case 0:
		return fault.Private{}
	case 1:
		return fault.Private{Public: "it is mounted elsewhere on this node, and the log says where", Detail: who[0]}
	}
	return fault.Private{Public: fmt.Sprintf("it is mounted in %d places on this node, and the log says where", len(who)),
		Detail: strings.Join(who, "; ")}
}

// Holders returns one line for each mount namespace in which the device's file system is
// mounted, at most five. It covers the namespaces that this process can inspect, and reads a
// mount table for each. It is slow: use it for error messages only.
func Holders(d Device) []string {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, p := range procs {
		if pid, err := strconv.Atoi(p.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	// Sorted, the first process of a namespace is its oldest, most often a container's first.
	slices.Sort(pids)
	own, _ := os.Readlink("/proc/self/ns/mnt")
	seen := map[string]bool{}
	var holders []string
	name, _ := sysName(d)
	const most = 5
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/", pid)
		ns, err := os.Readlink(dir + "ns/mnt")
		if err != nil || seen[ns] {
			continue
		}
		if _, err := os.Readlink(dir + "exe"); err != nil && ns != own {
			continue // a kernel thread has no executable
		}
		b, err := os.ReadFile(dir + "mountinfo")
		if err != nil {
			continue
		}
		seen[ns] = true
		at := mountedAt(string(b), fmt.Sprintf("%d:%d", d.Major, d.Minor), "/dev/"+name)
		if at == "" {
			continue
		}
		where := "mounted at " + at
		if ns != own {
			comm, _ := os.ReadFile(dir + "comm")
			where += fmt.Sprintf(" in the mount namespace of process %d (%s)", pid, strings.TrimSpace(string(comm)))
		}
		if holders = append(holders, where); len(holders) == most {
			break
		}
	}
	return holders
}

// mountedAt returns the first mount point of a device in the content of a mountinfo file. It
// also compares the source, because some file systems (btrfs) show a device number of their own
// there.
func mountedAt(mountinfo, dev, source string) string {
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 4 && (f[2] == dev || strings.Contains(line, " "+source+" ")) {
			return f[4]
		}
	}
	return ""
}

// Written counts the writes to a block device since it was created or bound. If two values are
// equal and nothing is in flight, the content of the device did not change between them.
type Written struct{ Writes, Sectors, Discards, InFlight uint64 }

// WrittenTo reads the kernel's statistics, block/DEVICE/stat and inflight in sysfs.
func WrittenTo(d Device) (Written, error) {
	dir := fmt.Sprintf("/sys/dev/block/%d:%d/", d.Major, d.Minor)
	if on, err := os.ReadFile(dir + "queue/iostats"); err != nil || strings.TrimSpace(string(on)) != "1" {
		return Written{}, fmt.Errorf("%s: the kernel does not count its writes (%squeue/iostats): %v", d.Path, dir, err)
	}
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return Written{}, err
	}
	inflight, err := os.ReadFile(dir + "inflight")
	if err != nil {
		return Written{}, err
	}
	// Documentation/block/stat.rst: reads, merges, sectors, ticks; the same four of writes;
	// three more; the same four of discards. inflight: reads, writes.
	f, g := strings.Fields(string(stat)), strings.Fields(string(inflight))
	if len(f) < 12 || len(g) < 2 {
		return Written{}, fmt.Errorf("%sstat or inflight cannot be understood: %q, %q", dir, stat, inflight)
	}
	var w Written
	for _, n := range []struct {
		text string
		into *uint64
	}{{f[4], &w.Writes}, {f[6], &w.Sectors}, {f[11], &w.Discards}, {g[1], &w.InFlight}} {
		if *n.into, err = strconv.ParseUint(n.text, 10, 64); err != nil {
			return Written{}, err
		}
	}
	return w, nil
}

// ReadOnlyDevice reports whether the kernel certainly has the device as read-only.
func ReadOnlyDevice(d Device) bool {
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/ro", d.Major, d.Minor))
	return err == nil && strings.TrimSpace(string(b)) == "1"
}
