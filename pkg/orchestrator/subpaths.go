package orchestrator

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// subPaths returns them as crust.ContextSubPaths wants them.
func (d Deferral) subPaths() (string, error) {
	return crust.FormatSubPaths(slices.Collect(maps.Values(d.SubPaths)))
}

// MountSource returns the source that the runtime is to be given for a mount of a pod's container. A kubelet binds the subPath of a
// volume on the host, where a deferred volume is not. Of that bind, the result is the path below the volume's target, as KEP-2857 has it.
// The result is the same source for any other mount. Call it for each mount before a container is created, after ContainerStarts.
func (a *Agent) MountSource(s Sandbox, source string) (string, error) {
	clean := filepath.Clean(source)
	for _, d := range a.Records.Of(s.PodUID) {
		// By the end of the path, because the container runtime may have followed links that lead to the kubelet's directory.
		_, mount, found := strings.Cut(clean, filepath.Join("/pods", s.PodUID, "volume-subpaths", d.Volume)+"/")
		if !found || d.Volume == "" {
			continue
		}
		sub, known := d.SubPaths[mount]
		if !known {
			return "", fmt.Errorf("volume %s: %s is no subPath that the pod had when its volume was deferred", d.Volume, mount)
		}
		return filepath.Join(d.Target, sub), nil
	}
	return source, nil
}
