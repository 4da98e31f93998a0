package confine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Each program runs in its own cgroup (cgroups(7), version 2). The cgroup limits memory, including
// the kernel's memory for the program and the cached pages of its device, and gives CPU time a low
// weight. It is a sibling of this process's cgroup: a cgroup with processes cannot have children
// with limits.

// cgroupNames is the prefix of the cgroups' names.
const cgroupNames = "crust-program-"

// mounted is the mount point of cgroups version 2, if the machine has no others.
const mounted = "/sys/fs/cgroup"

// cgroupLimits are written if their controller is enabled. CPU time is a weight: a program gets
// little under load.
var cgroupLimits = []struct{ controller, file, value string }{
	// Above the address space limit: a program that asks for too much exits by itself instead of by
	// SIGKILL in the middle of a repair.
	{"memory", "memory.max", strconv.Itoa(Memory + Memory/4)},
	{"pids", "pids.max", "4096"}, // threads count: xfs_repair has some for each allocation group
	{"cpu", "cpu.weight", "10"},
}

// Cgroups returns the reason why programs have no cgroup of their own, nil if they have one.
func Cgroups() error {
	_, err := cgroups()
	return err
}

// cgroups is the parent directory of the programs' cgroups.
var cgroups = sync.OnceValues(func() (*os.File, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	own, err := ownCgroup(string(b))
	if err != nil {
		return nil, err
	}
	// Do not mount it ourselves: that would reset the options of the machine's cgroups.
	all, err := linux.Openat2(linux.CWD, mounted, linux.ODirectory, 0)
	if err != nil {
		return nil, err
	}
	defer all.Close()
	if st, err := linux.Fstatfs(all); err != nil || st.Type != linux.Cgroup2 {
		return nil, errors.Join(err, fmt.Errorf("%s shows no cgroups of version 2", mounted))
	}
	parent, err := linux.Openat2(all, "."+path.Dir(own), linux.ODirectory, linux.ResolveBeneath)
	if err != nil {
		return nil, err
	}
	on, err := readAt(parent, "cgroup.subtree_control")
	if err == nil && !slices.Contains(strings.Fields(on), "memory") {
		err = fmt.Errorf("the cgroup %s gives its children no memory controller (%q)", path.Dir(own), on)
	}
	if err == nil {
		err = sweep(parent)
	}
	if err == nil { // can a child be made?
		var try *cgroup
		if try, err = newCgroup(parent); err == nil {
			try.remove()
		}
	}
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	return parent, nil
})

// ownCgroup returns this process's version 2 cgroup from /proc/self/cgroup.
func ownCgroup(lines string) (string, error) {
	for line := range strings.Lines(lines) {
		own, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		switch {
		case !ok:
		case own == "/":
			return "", errors.New("this process is in the root cgroup, or in that of its cgroup namespace")
		case !path.IsAbs(own) || path.Clean(own) != own || strings.HasPrefix(own, "/.."):
			return "", fmt.Errorf("this process's cgroup, %q, is out of sight", own)
		default:
			return own, nil
		}
	}
	return "", errors.New("this machine has no cgroups of version 2")
}

// sweep removes the cgroups of programs that outlived the process that started them.
func sweep(parent *os.File) error {
	dir, err := linux.Openat(parent, ".", os.O_RDONLY|linux.ODirectory, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if strings.HasPrefix(name, cgroupNames) {
			_ = linux.Rmdirat(parent, name) // fails while there is a process in it
		}
	}
	return err
}

// cgroup is the cgroup of one program; nil means none.
type cgroup struct {
	parent *os.File
	name   string
}

// ownOrNone makes a cgroup for a program; nil if cgroups are unavailable.
func ownOrNone() (*cgroup, error) {
	parent, err := cgroups()
	if err != nil {
		return nil, nil //nolint:nilerr // Cgroups tells it
	}
	return newCgroup(parent)
}

func newCgroup(parent *os.File) (*cgroup, error) {
	g := &cgroup{parent, cgroupNames + rand.Text()}
	if err := linux.Mkdirat(parent, g.name, 0o755); err != nil {
		return nil, fmt.Errorf("a cgroup for the program: %w", err)
	}
	on, err := g.read("cgroup.controllers")
	for _, l := range cgroupLimits {
		if err == nil && slices.Contains(strings.Fields(on), l.controller) {
			err = g.write(l.file, l.value)
		}
	}
	if err != nil {
		g.remove()
		return nil, fmt.Errorf("a cgroup for the program: %w", err)
	}
	return g, nil
}

// add moves a process into the cgroup. A process that has ended is no error.
func (g *cgroup) add(pid int) error {
	if g == nil {
		return nil
	}
	err := g.write("cgroup.procs", strconv.Itoa(pid))
	if errors.Is(err, linux.ESRCH) {
		return nil
	}
	return err
}

// remove removes the cgroup after its program has ended. Leftovers are swept at the next start.
func (g *cgroup) remove() {
	if g == nil {
		return
	}
	const moment = time.Second // until the kernel has released the last process
	for end := time.Now().Add(moment); ; time.Sleep(time.Millisecond) {
		err := linux.Rmdirat(g.parent, g.name)
		if !errors.Is(err, linux.EBUSY) || time.Now().After(end) {
			return
		}
	}
}

func (g *cgroup) read(file string) (string, error) { return readAt(g.parent, g.name+"/"+file) }

func (g *cgroup) write(file, value string) error {
	f, err := linux.Openat(g.parent, g.name+"/"+file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func readAt(dir *os.File, name string) (string, error) {
	f, err := linux.Openat(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	return strings.TrimSpace(string(b)), err
}
