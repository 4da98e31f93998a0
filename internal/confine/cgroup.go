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

// A program has a cgroup of its own (cgroups(7), version 2). It limits memory, with
// what the kernel takes for the program and the cached pages of its device, and gives
// processor time a low weight. It lies beside this process's own: a cgroup that has
// processes cannot have children with limits.

// cgroupNames is the prefix of their names.
const cgroupNames = "crust-program-"

// mounted is where cgroups of version 2 are, if the machine has no others.
const mounted = "/sys/fs/cgroup"

// cgroupLimits are written if their controller is on. Processor time is a weight:
// under load a program gets little.
var cgroupLimits = []struct{ controller, file, value string }{
	// Above the address space: a program that asks for too much ends by itself, not by
	// SIGKILL in the middle of a repair.
	{"memory", "memory.max", strconv.Itoa(Memory + Memory/4)},
	{"pids", "pids.max", "4096"}, // threads count: xfs_repair has some for each allocation group
	{"cpu", "cpu.weight", "10"},
}

// Cgroups tells why programs have no cgroup of their own; nil where they have one.
func Cgroups() error {
	_, err := cgroups()
	return err
}

// cgroups is the directory that programs' cgroups lie in.
var cgroups = sync.OnceValues(func() (*os.File, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	own, err := ownCgroup(string(b))
	if err != nil {
		return nil, err
	}
	// A mount of our own would set the options of the machine's cgroups anew.
	all, err := linux.Openat2(nil, mounted, linux.ODirectory, 0)
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
	if err == nil { // whether one can be made
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

// ownCgroup is this process's cgroup of version 2, by /proc/self/cgroup.
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
			_ = linux.Rmdirat(parent, name) // not while there is a process in it
		}
	}
	return err
}

// cgroup is one program's; nil is none.
type cgroup struct {
	parent *os.File
	name   string
}

// ownOrNone gives a program its cgroup; nil where there can be none.
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

// add puts a process into it. That it has ended is no error.
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

// remove removes it when its program has ended. What is left is swept at the next
// start.
func (g *cgroup) remove() {
	if g == nil {
		return
	}
	const moment = time.Second // until the kernel has let go of the last process
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
