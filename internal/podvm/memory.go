package podvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// The runtime's shim learns of an out-of-memory kill only from the events of the container's cgroup on the host. The guest's kernel
// causes none there. So the monitor limits the stub's cgroup and the stub exceeds the limit: the host's kernel kills it, and the shim
// reports that.

// noteStub remembers a container's stub.
func (p *Pod) noteStub(container string, stub process) error {
	return writeJSON(filepath.Join(p.at("containers"), container), stub)
}

func (p *Pod) stub(container string) (s process, err error) {
	return s, readJSON(filepath.Join(p.at("containers"), container), &s)
}

// stubEnded tells whether a container is known to have had a stub that has ended.
func (p *Pod) stubEnded(container string) bool {
	s, err := p.stub(container)
	return err == nil && !s.runs()
}

// room is how many more bytes the stub may use.
const room = 1 << 20

// starve limits the cgroup of a container's stub to little more than it has.
func (p *Pod) starve(container string) error {
	if !idPattern.MatchString(container) {
		return fmt.Errorf("container %q", container)
	}
	stub, err := p.stub(container)
	if err != nil {
		return err
	}
	if !stub.same() {
		return fmt.Errorf("the stub of container %s has ended", container)
	}
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", stub.PID))
	if err != nil {
		return err
	}
	g := memoryCgroup(string(table))
	if g.dir == "" {
		return fmt.Errorf("no memory controller in %q", table)
	}
	have, err := os.ReadFile(filepath.Join(g.dir, g.usage))
	if err != nil {
		return err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(have)), 10, 64)
	if err != nil {
		return err
	}
	most := strconv.FormatInt(n+room, 10)
	if err := os.WriteFile(filepath.Join(g.dir, g.limit), []byte(most), 0o644); err != nil {
		return err
	}
	// On a machine with swap the kernel would swap instead. Without swap, or without its accounting, there is no such file.
	if g.swap == "memory.swap.max" {
		most = "0"
	}
	err = os.WriteFile(filepath.Join(g.dir, g.swap), []byte(most), 0o644)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil
	}
	return err
}

// memoryGroup is a memory cgroup, with the names of its files.
type memoryGroup struct{ dir, usage, limit, swap string }

// memoryCgroup finds a process's memory cgroup in the text of its /proc/PID/cgroup.
func memoryCgroup(table string) (g memoryGroup) {
	for line := range strings.Lines(table) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) != 3:
		case f[1] == "memory":
			return memoryGroup{filepath.Join(cgroupRoot, "memory", f[2]), "memory.usage_in_bytes", "memory.limit_in_bytes",
				"memory.memsw.limit_in_bytes"}
		case f[1] == "" && unifiedOnly():
			g = memoryGroup{filepath.Join(cgroupRoot, f[2]), "memory.current", "memory.max", "memory.swap.max"}
		}
	}
	return g
}

// exhaust takes memory until the kernel kills this process. If its cgroup has no limit, it returns after 256 MiB and a second.
func exhaust() {
	const piece, most = 1 << 20, 256
	var taken [][]byte
	for range most {
		b := make([]byte, piece)
		for i := 0; i < len(b); i += os.Getpagesize() {
			b[i] = 1
		}
		taken = append(taken, b)
	}
	time.Sleep(time.Second)
	_ = taken
}

// The kernel of the host kills processes with a high score first, proc(5). A container runtime has a low one, which its children inherit.
const (
	firstScore = 1000 // of a microVM without containers
	scoreFile  = "oom_score_adj"
)

// spare gives the programs of the microVM the score of a container in it, if that is lower: they are as dear as their dearest container.
func (p *Pod) spare(container object) error {
	text, ok := container["oomScoreAdj"].(json.Number)
	if !ok || len(p.Cgroups) == 0 {
		return nil
	}
	score, err := strconv.Atoi(text.String())
	if err != nil {
		return fmt.Errorf("oomScoreAdj: %w", err)
	}
	pids, err := os.ReadFile(filepath.Join(p.Cgroups[0], "cgroup.procs"))
	if err != nil {
		return err
	}
	for pid := range strings.FieldsSeq(string(pids)) {
		err := lowerScore(filepath.Join("/proc", pid, scoreFile), score)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, linux.ESRCH) { // or it has ended
			return err
		}
	}
	return nil
}

func lowerScore(file string, score int) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if now, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || now <= score {
		return err
	}
	return os.WriteFile(file, []byte(strconv.Itoa(score)), 0o644)
}
