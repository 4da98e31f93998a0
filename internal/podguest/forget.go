package podguest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// forget makes the kernel drop what it remembers of files that were a container's, and are no other's. As long as it remembers a file, the
// host's virtiofsd has it open, and the file system of that file is in use on the host.
func forget(id string) error {
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
		if err := linux.Unmount(below[i]); err != nil && !isGone(err) {
			return fmt.Errorf("unmount %s: %w", below[i], err)
		}
	}
	const directoriesAndInodes = "2"
	return linux.SetSysctl("vm.drop_caches", directoriesAndInodes)
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
		var c struct{ Mounts []struct{ Source string } }
		if err := json.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, m := range c.Mounts {
			if name, ok := strings.CutPrefix(m.Source, filepath.Join(Shared, Common)+"/"); ok {
				kept[name] = true
			}
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
