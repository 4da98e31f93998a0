package orchestrator

import (
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// subPaths returns them as crust.ContextSubPaths wants them.
func (d Deferral) subPaths() (string, error) {
	return crust.FormatSubPaths(slices.Collect(maps.Values(d.SubPaths)))
}

// noteSubPaths adds the subPaths of the pod's volume with this name. Ephemeral containers have none.
func (v *volume) noteSubPaths(pod *corev1.Pod, name string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for i, m := range c.VolumeMounts {
			if m.Name != name || m.SubPath == "" && m.SubPathExpr == "" {
				continue
			}
			sub, known := m.SubPath, true
			if m.SubPathExpr != "" {
				sub, known = expand(m.SubPathExpr, func(name string) (string, bool) { return variable(pod, c.Env, name) })
			}
			if !known {
				v.subPathExpr = true
				continue
			}
			if v.subPaths == nil {
				v.subPaths = map[string]string{}
			}
			v.subPaths[c.Name+"/"+strconv.Itoa(i)] = filepath.Clean(sub)
		}
	}
}

// expand replaces references to variables, $(NAME), as kubelets do: $$ is a dollar. known is false if the kubelet may see it differently.
func expand(expr string, variable func(name string) (string, bool)) (value string, known bool) {
	var out strings.Builder
	for {
		before, after, found := strings.Cut(expr, "$")
		out.WriteString(before)
		if !found {
			return out.String(), true
		}
		switch {
		case strings.HasPrefix(after, "$"):
			out.WriteString("$")
			expr = after[1:]
		case strings.HasPrefix(after, "("):
			name, rest, closed := strings.Cut(after[1:], ")")
			value, known := variable(name)
			if !closed || !known {
				return "", false
			}
			out.WriteString(value)
			expr = rest
		default:
			return "", false
		}
	}
}

// variable returns the value of a container's variable, if it is a text, or a field of the pod that does not change. Others are known to
// the kubelet only.
func variable(pod *corev1.Pod, env []corev1.EnvVar, name string) (value string, known bool) {
	for _, e := range env {
		if e.Name != name {
			continue
		}
		value, known = e.Value, !strings.Contains(e.Value, "$") // the last one counts
		if from := e.ValueFrom; from != nil {
			known = from.FieldRef != nil
			switch {
			case !known:
			case from.FieldRef.FieldPath == "metadata.name":
				value = pod.Name
			case from.FieldRef.FieldPath == "metadata.namespace":
				value = pod.Namespace
			case from.FieldRef.FieldPath == "metadata.uid":
				value = string(pod.UID)
			case from.FieldRef.FieldPath == "spec.nodeName":
				value = pod.Spec.NodeName
			default:
				known = false
			}
		}
	}
	return value, known
}

// MountSources returns the sources that the runtime gets for a container's mounts. A kubelet binds a volume's subPath on the host, where
// a deferred volume is not mounted. The source of such a bind becomes the path below the volume's target, as KEP-2857 specifies. Other
// sources stay. Call it before a container is created, after ContainerStarts.
//
// It is an error if a source is in a volume whose record cannot be used: the container would get the placeholder. If the container runtime
// has resolved a link to the kubelet's directory, this is not seen.
func (a *Agent) MountSources(s Sandbox, sources []string) ([]string, error) {
	for _, source := range sources {
		target := filepath.Clean(source)
		if dir, bind, sub := strings.Cut(target, "/pods/"+s.PodUID+"/volume-subpaths/"); sub {
			volume, _, _ := strings.Cut(bind, "/") // kubelets use the PersistentVolume's name in both paths
			target = filepath.Join(dir, "pods", s.PodUID, "volumes/kubernetes.io~csi", volume, "mount")
		}
		if err := a.Records.Unusable(target); err != nil {
			return nil, err
		}
	}
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
	return sources, nil
}
