package main

import "fmt"

// words are the annotations by which a container runtime tells of a container.
type words struct {
	sandbox string // the sandbox's id
	kind    string // "sandbox" for the container that holds the pod's namespaces
}

// runtimes are containerd, CRI-O, and whoever else starts containers. CRI-O adds
// a pod's own annotations to these, so a pod can speak as another runtime does.
var runtimes = []words{
	{"io.kubernetes.cri.sandbox-id", "io.kubernetes.cri.container-type"},
	{"io.kubernetes.cri-o.SandboxID", "io.kubernetes.cri-o.ContainerType"},
	{"csi.crust.dev/sandbox-id", ""},
}

// sandbox gives the sandbox of the container, and whether the container is the one
// that holds the pod's namespaces. Where several runtimes seem to speak, they have
// to say the same: at most one of them made this container, and who put the other
// annotation there is not known.
func (s *spec) sandbox() (id string, isSandbox bool, err error) {
	differ := func(name, other, value, otherValue string) error {
		return fmt.Errorf("the annotations %s (%q) and %s (%q) say different things of this container's sandbox, and one of them may be its pod's: "+
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
