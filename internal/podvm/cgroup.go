package podvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// cgroupRoot is where the hierarchies are mounted.
const cgroupRoot = "/sys/fs/cgroup"

// cgroups returns, for each hierarchy, the directory for a pod's microVM: beside its own container, below the kubelet's cgroup of the pod,
// whose limits hold for it. table is the text of the container's /proc/PID/cgroup, cgroups(7).
func cgroups(table, pod string) (dirs []string) {
	for line := range strings.Lines(table) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || f[2] == "/" {
			continue
		}
		hierarchy := strings.TrimPrefix(f[1], "name=")
		if f[1] == "" && !unifiedOnly() {
			hierarchy = "unified"
		}
		dirs = append(dirs, filepath.Join(cgroupRoot, hierarchy, filepath.Dir(f[2]), "crust-vm-"+pod))
	}
	return dirs
}

// unifiedOnly tells whether this machine has cgroups v2 and no others.
func unifiedOnly() bool {
	_, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers"))
	return err == nil
}

// enter moves a process into the cgroups of its pod's microVM. A hierarchy that is not mounted here is left out.
func (p *Pod) enter(pid int) error {
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.Pause.PID))
	if err != nil {
		return err
	}
	p.Cgroups = slices.DeleteFunc(cgroups(string(table), p.ID), func(dir string) bool {
		_, err := os.Stat(filepath.Dir(dir))
		return errors.Is(err, os.ErrNotExist)
	})
	// Whoever removes the pod learns of them here, also if this process ends in between.
	if err := writeJSON(p.at("pod.json"), p); err != nil {
		return err
	}
	for _, dir := range p.Cgroups {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		// In cgroups v1 a new cpuset is empty, and takes no process.
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
			if b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name)); err == nil {
				_ = os.WriteFile(filepath.Join(dir, name), b, 0o644) // entering fails if that mattered
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// leave removes the cgroups of a microVM. Its programs end a moment after its monitor.
func (p *Pod) leave(ctx context.Context) error {
	for _, dir := range p.Cgroups {
		for {
			err := os.Remove(dir)
			if err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
				return err
			}
		}
	}
	return nil
}
