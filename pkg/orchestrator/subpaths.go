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

// MountSources returns the sources that the runtime gets for a container's mounts. A kubelet binds a volume's subPath on the host, where
// a deferred volume is not mounted. The source of such a bind becomes the path below the volume's target, as KEP-2857 specifies. Other
// sources stay. Call it before a container is created, after ContainerStarts.
func (a *Agent) MountSources(s Sandbox, sources []string) []string {
	volumes := map[string]Deferral{}
	for _, d := range a.Records.Of(s.PodUID) {
		if d.Volume != "" && len(d.SubPaths) > 0 {
			volumes[d.Volume] = d
		}
	}
	sources = slices.Clone(sources)
	for i, source := range sources {
		// Only the end of the path is compared, because the container runtime may have resolved links to the kubelet's directory.
		_, bind, _ := strings.Cut(filepath.Clean(source), "/pods/"+s.PodUID+"/volume-subpaths/")
		volume, mount, _ := strings.Cut(bind, "/")
		// Another volume of the pod may have the PersistentVolume's name; its mounts have other indexes.
		if sub, known := volumes[volume].SubPaths[mount]; known {
			sources[i] = filepath.Join(volumes[volume].Target, sub)
		}
	}
	return sources
}
