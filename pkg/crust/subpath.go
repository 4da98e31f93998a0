package crust

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ContextSubPaths is a JSON list of the subPaths of a volume that the pod's containers mount. An orchestrator adds it to the
// volume context of NodePublishVolume, if the driver has SubPathCapability and may defer the volume. The driver then makes these
// directories, empty, in what it puts at the target in the volume's place: a kubelet binds them on the host before it asks the runtime for
// a container, and fails if they are not there. FormatSubPaths and ParseSubPaths convert.
const ContextSubPaths = "csi.crust.dev/subPaths"

// SubPathCapability says that a CSI node plugin accepts ContextSubPaths. Upstream's enumeration does not have the number.
const SubPathCapability csi.NodeServiceCapability_RPC_Type = 285702

// maxSubPathDirectories bounds what a pod can make a driver keep for one volume: an inode of about 1 KiB for each directory.
const maxSubPathDirectories = 255

// FormatSubPaths is the value of ContextSubPaths for sub-paths of a pod. The error is that of ParseSubPaths.
func FormatSubPaths(subs []string) (string, error) {
	clean := make([]string, len(subs))
	for i, sub := range subs {
		clean[i] = filepath.Clean(sub)
	}
	slices.Sort(clean)
	b, err := json.Marshal(slices.Compact(clean))
	if err != nil {
		return "", err
	}
	_, err = ParseSubPaths(string(b))
	return string(b), err
}

// ParseSubPaths returns the directories that a placeholder needs: "." first, then each path of the list and its parents, parents before
// children. The error is fault.Invalid for a path that leads out of the volume, a name or path that is too long, or more than 255
// directories.
func ParseSubPaths(text string) ([]string, error) {
	var subs []string
	if err := json.Unmarshal([]byte(text), &subs); err != nil || len(subs) == 0 {
		return nil, fault.New(fault.Invalid, "%s: a list of relative paths in JSON is needed", ContextSubPaths)
	}
	all := map[string]bool{}
	for _, sub := range subs {
		const longestName, longestPath = 255, 4000 // of the kernel's: NAME_MAX, and PATH_MAX with room for the target
		if sub != filepath.Clean(sub) || !filepath.IsLocal(sub) || strings.Contains(sub, "\x00") || len(sub) > longestPath ||
			slices.ContainsFunc(strings.Split(sub, "/"), func(name string) bool { return len(name) > longestName }) {
			return nil, fault.New(fault.Invalid, "subPath %.80q: a path inside the volume is needed, of names of up to %d bytes", sub, longestName)
		}
		for dir := sub; dir != "." && !all[dir]; dir = filepath.Dir(dir) {
			if all[dir] = true; len(all) > maxSubPathDirectories {
				return nil, fault.New(fault.Invalid, "the subPaths of one volume have more than %d directories", maxSubPathDirectories)
			}
		}
	}
	// A path sorts before what begins with it.
	return append([]string{"."}, slices.Sorted(maps.Keys(all))...), nil
}
