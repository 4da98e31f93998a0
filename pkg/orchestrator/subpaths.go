package orchestrator

import (
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

// MountSources returns the sources that the runtime is to be given for the mounts of a pod's container. A kubelet binds the subPath of a
// volume on the host, where a deferred volume is not. Of that bind, the result is the path below the volume's target, as KEP-2857 has it.
// Other sources stay as they are. Call it before a container is created, after ContainerStarts.
func (a *Agent) MountSources(s Sandbox, sources []string) []string {
	volumes := map[string]Deferral{}
	for _, d := range a.Records.Of(s.PodUID) {
		if d.Volume != "" && len(d.SubPaths) > 0 {
			volumes[d.Volume] = d
		}
	}
	sources = slices.Clone(sources)
	for i, source := range sources {
		// By the end of the path, because the container runtime may have followed links that lead to the kubelet's directory.
		_, bind, _ := strings.Cut(filepath.Clean(source), "/pods/"+s.PodUID+"/volume-subpaths/")
		volume, mount, _ := strings.Cut(bind, "/")
		// A volume of the pod's own may have the name of the persistent volume.
		if sub, known := volumes[volume].SubPaths[mount]; known {
			sources[i] = filepath.Join(volumes[volume].Target, sub)
		}
	}
	return sources
}
