package podguest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// mounting is held while what containers have in common is mounted or unmounted.
var mounting sync.Mutex

// makeKnown is newProcess, and has the kernel mount what the container may have in common with others: virtiofs mounts each file system of
// the host's by itself, as soon as it is looked at. In the container's own mount namespace that would be a mount of the container's own.
func makeKnown(id, dir string, config []byte) (*process, error) {
	mounting.Lock()
	defer mounting.Unlock()
	p, err := newProcess(id, dir, config)
	if err != nil {
		return nil, err
	}
	names, err := commonsOf(config)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		// A file is not mounted. What cannot be opened is runc's to tell.
		if f, err := linux.Open(filepath.Join(Shared, Common, name), linux.ODirectory); err == nil {
			f.Close()
		}
	}
	return p, nil
}

// commonsOf returns what a container may have in common with others.
func commonsOf(config []byte) (names []string, err error) {
	var c struct{ Mounts []struct{ Source string } }
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fault.New(fault.Invalid, "config.json: %w", err)
	}
	for _, m := range c.Mounts {
		if name, ok := strings.CutPrefix(m.Source, filepath.Join(Shared, Common)+"/"); ok {
			names = append(names, name)
		}
	}
	return names, nil
}

// forget makes the kernel drop what it remembers of files that were a container's, and are no other's. As long as it remembers a file, the
// host's virtiofsd has it open, and the file system of that file is in use on the host.
func forget(id string) error {
	mounting.Lock()
	defer mounting.Unlock()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	kept, err := commons()
	if err != nil {
		return err
	}
	below := forgettable(string(mounts), id, kept)
	for i := len(below) - 1; i >= 0; i-- { // the kernel made these mounts by itself; inner ones come last
		if uerr := linux.Unmount(below[i]); uerr != nil && !isGone(uerr) {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", below[i], uerr))
		}
	}
	const directoriesAndInodes = "2"
	return errors.Join(err, linux.SetSysctl("vm.drop_caches", directoriesAndInodes))
}

// commons returns which of what containers may have in common is some container's. A second mount of it would be another
// file system than the one that the container has.
func commons() (kept map[string]bool, err error) {
	kept = map[string]bool{}
	all, err := filepath.Glob(filepath.Join(dir, "*", "config.json"))
	if err != nil {
		return nil, err
	}
	for _, file := range all {
		b, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // it is being removed
		}
		if err != nil {
			return nil, err
		}
		names, err := commonsOf(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, name := range names {
			kept[name] = true
		}
	}
	return kept, nil
}

// forgettable returns, from the text of mountinfo, where the kernel has mounted what was a container's, and what is no container's.
func forgettable(mounts, id string, kept map[string]bool) (points []string) {
	const mountPoint = 4
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		if len(f) <= mountPoint {
			continue
		}
		point := unescape.Replace(f[mountPoint])
		common, ok := strings.CutPrefix(point, filepath.Join(Shared, Common)+"/")
		name, _, _ := strings.Cut(common, "/")
		if ok && !kept[name] || strings.HasPrefix(point, filepath.Join(Shared, id)+"/") {
			points = append(points, point)
		}
	}
	return points
}
