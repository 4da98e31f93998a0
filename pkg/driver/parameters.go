package driver

import (
	"cmp"
	"fmt"
	"sort"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Parameters are those of a StorageClass, or of a static volume's attributes.
type Parameters struct {
	Pool  string // empty: the first pool
	Thick bool   // provisioning=thick

	FSGroupStrategy           string // chown (also when empty), idmap, option
	FSGroupChangePolicy       ownership.Policy
	RecursiveReadOnly         string // Disabled, IfPossible (also when empty), Enabled
	AllowRuntimeAssistedMount bool
	// HostMayMount: this node's kernel may mount what a guest had.
	HostMayMount bool
}

// parameter is one key: its values (none: any text), and its setter.
type parameter struct {
	values []string
	set    func(*Parameters, string)
}

var parameters = map[string]parameter{
	"pool":            {nil, func(p *Parameters, v string) { p.Pool = v }},
	"provisioning":    {[]string{"thin", "thick"}, func(p *Parameters, v string) { p.Thick = v == "thick" }},
	"fsGroupStrategy": {[]string{"chown", "idmap", "option"}, func(p *Parameters, v string) { p.FSGroupStrategy = v }},
	"fsGroupChangePolicy": {[]string{"Always", "OnRootMismatch"},
		func(p *Parameters, v string) { p.FSGroupChangePolicy = ownership.Policy(v) }},
	"recursiveReadOnly":  {[]string{"Disabled", "IfPossible", "Enabled"}, func(p *Parameters, v string) { p.RecursiveReadOnly = v }},
	crust.AllowParameter: {[]string{"true", "false"}, func(p *Parameters, v string) { p.AllowRuntimeAssistedMount = v == "true" }},
	"hostMayMount":       {[]string{"true", "false"}, func(p *Parameters, v string) { p.HostMayMount = v == "true" }},
}

// orchestratorPrefix begins keys that Kubernetes adds for drivers' information.
const orchestratorPrefix = "csi.storage.k8s.io/"

// ParseParameters parses the parameters of a StorageClass. An unknown key or value is an error:
// nothing is ignored.
func ParseParameters(m map[string]string) (Parameters, error) {
	var p Parameters
	for _, key := range sortedKeys(m) {
		if strings.HasPrefix(key, orchestratorPrefix) {
			continue
		}
		if err := p.set(key, m[key]); err != nil {
			return Parameters{}, err
		}
	}
	return p, nil
}

func (p *Parameters) set(key, value string) error {
	def, ok := parameters[key]
	if !ok {
		return fault.New(fault.Invalid, "parameter %q is unknown; known are %s", key, strings.Join(sortedKeys(parameters), ", "))
	}
	if def.values != nil {
		known := false
		for _, v := range def.values {
			known = known || v == value
		}
		if !known {
			return fault.New(fault.Invalid, "parameter %s=%q: the value must be one of %s", key, value, strings.Join(def.values, ", "))
		}
	}
	def.set(p, value)
	return nil
}

// What the orchestrator, or crust-agent for it, says of the pod.
const (
	attrPodGroup = orchestratorPrefix + "pod.fsGroup"
)

// attributes are a volume context: the parameters of the class, carried with the volume, and facts
// about the pod.
type attributes struct {
	Parameters
	podGroup  string // as it was sent
	ownUserns bool   // the pod has a user namespace: the runtime will id-map the mount
	// hostKernel: the runtime that gets the volume mounts it with this kernel.
	hostKernel bool
	// subPaths are the directories of a placeholder; nil for none.
	subPaths []string
}

// parseAttributes parses a volume context. It ignores keys of other domains (kubelet, sidecars). static, which may be nil, knows the
// attributes of its volumes.
func parseAttributes(m map[string]string, static volume.StaticSource) (attributes, error) {
	var a attributes
	known := ""
	if static != nil {
		known = static.AttributeNames() + " (static volumes) and "
	}
	for _, key := range sortedKeys(m) {
		if static != nil {
			if ok, err := static.Attribute(m, key); err != nil {
				return attributes{}, err
			} else if ok {
				continue
			}
		}
		switch {
		case key == attrPodGroup, key == crust.ContextGroupPolicy, key == crust.ContextHostUsers, key == crust.ContextKernel,
			key == crust.ContextSubPaths:
			continue
		case strings.Contains(key, "/"):
			if strings.HasPrefix(key, "csi.crust.dev/") {
				return attributes{}, fault.New(fault.Invalid, "attribute %q is unknown; known are %s, %s and %s",
					key, crust.ContextHostUsers, crust.ContextKernel, crust.ContextSubPaths)
			}
			continue
		}
		if _, ok := parameters[key]; !ok {
			return attributes{}, fault.New(fault.Invalid, "attribute %q is unknown; known are %sthe parameters %s",
				key, known, strings.Join(sortedKeys(parameters), ", "))
		}
		if err := a.set(key, m[key]); err != nil {
			return attributes{}, err
		}
	}
	a.podGroup = m[attrPodGroup]
	// The pod overrides the class.
	if policy, ok := m[crust.ContextGroupPolicy]; ok && policy != "" {
		if err := a.set("fsGroupChangePolicy", policy); err != nil {
			return attributes{}, err
		}
	}
	switch m[crust.ContextKernel] {
	case "", "guest":
	case "host":
		a.hostKernel = true
	default:
		return attributes{}, fault.New(fault.Invalid, "attribute %s=%q: the value must be host or guest", crust.ContextKernel,
			m[crust.ContextKernel])
	}
	if text := m[crust.ContextSubPaths]; text != "" {
		var err error
		if a.subPaths, err = crust.ParseSubPaths(text); err != nil {
			return attributes{}, err
		}
	}
	switch m[crust.ContextHostUsers] {
	case "", "true":
	case "false":
		a.ownUserns = true
	default:
		return attributes{}, fault.New(fault.Invalid, "attribute %s=%q: the value must be true or false",
			crust.ContextHostUsers, m[crust.ContextHostUsers])
	}
	return a, nil
}

// defaults are the values of absent parameters.
var defaults = map[string]string{
	"provisioning": "thin", "fsGroupStrategy": "chown", "fsGroupChangePolicy": "OnRootMismatch", "recursiveReadOnly": "IfPossible",
	crust.AllowParameter: "false", "hostMayMount": "false",
}

// ownParameters drops parameters that the orchestrator adds, except the claim's
// namespace and name.
func ownParameters(m map[string]string) map[string]string {
	own := map[string]string{}
	for k, v := range m {
		if !strings.HasPrefix(k, orchestratorPrefix) || k == claimNamespace || k == claimName {
			own[k] = v
		}
	}
	return own
}

// otherParameter names a parameter whose value differs from the existing volume's, empty if there
// is none or they are unknown. The pool is compared elsewhere: it need not be named.
func otherParameter(have, want map[string]string) string {
	if have == nil {
		return ""
	}
	for _, key := range sortedKeys(parameters) {
		if key == "pool" {
			continue
		}
		if h, w := cmp.Or(have[key], defaults[key]), cmp.Or(want[key], defaults[key]); h != w {
			return fmt.Sprintf("its parameter %s is %q, and %q was asked for", key, h, w)
		}
	}
	return ""
}

// carried are the parameters that a volume's context carries to the node.
var carried = []string{"fsGroupStrategy", "fsGroupChangePolicy", "recursiveReadOnly", crust.AllowParameter, "hostMayMount"}

func volumeContext(parameters map[string]string) map[string]string {
	var m map[string]string
	for _, key := range carried {
		if v, ok := parameters[key]; ok {
			if m == nil {
				m = map[string]string{}
			}
			m[key] = v
		}
	}
	return m
}

// required refuses a request that lacks a field. It takes names, each with its value.
func required(fields ...string) error {
	for i := 0; i < len(fields); i += 2 {
		if fields[i+1] == "" {
			return invalid("%s is missing", fields[i])
		}
	}
	return nil
}

func invalid(format string, args ...any) error { return fault.New(fault.Invalid, format, args...) }

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func sortBy[T any](list []T, key func(T) string) {
	sort.Slice(list, func(i, j int) bool { return key(list[i]) < key(list[j]) })
}
