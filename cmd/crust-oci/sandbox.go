package main

import "fmt"

// words are the annotations by which a container runtime describes a container.
type words struct {
	sandbox string // the sandbox's id
	kind    string // "sandbox" for the container that holds the pod's namespaces
}

// runtimes lists containerd, CRI-O, and other callers that start containers. CRI-O adds a pod's own
// annotations, so a pod can imitate another runtime.
var runtimes = []words{
	{"io.kubernetes.cri.sandbox-id", "io.kubernetes.cri.container-type"},
	{"io.kubernetes.cri-o.SandboxID", "io.kubernetes.cri-o.ContainerType"},
	{"csi.crust.dev/sandbox-id", ""},
}

// sandbox returns the container's sandbox, and whether the container is the one that holds the
// pod's namespaces. If several runtimes' annotations are present, they must agree: at most one
// runtime made this container, and the origin of the other annotation is unknown.
func (s *spec) sandbox() (id string, isSandbox bool, err error) {
	differ := func(name, other, value, otherValue string) error {
		return fmt.Errorf(
			"the annotations %s (%q) and %s (%q) say different things of this container's sandbox, and one of them may be its pod's: "+
				"take the pod's annotation away", name, value, other, otherValue)
	}
	var from, kind, kindFrom string
	for _, r := range runtimes {
		if v := s.annotation(r.sandbox); v != "" {
			if id != "" && v != id {
				return "", false, differ(from, r.sandbox, id, v)
			}
			id, from = v, r.sandbox
		}
		if v := s.annotation(r.kind); v != "" {
			if kind != "" && v != kind {
				return "", false, differ(kindFrom, r.kind, kind, v)
			}
			kind, kindFrom = v, r.kind
		}
	}
	return id, kind == "sandbox", nil
}
