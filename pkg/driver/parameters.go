package driver

import (
	"sort"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

// Parameters are those of a StorageClass, or of a static volume's attributes.
type Parameters struct {
	Pool  string // empty: the first pool
	Thick bool   // provisioning=thick

	FSGroupStrategy           string // chown, idmap, option
	FSGroupChangePolicy       string // Always, OnRootMismatch
	RecursiveReadOnly         string // Disabled, IfPossible, Enabled
	AllowRuntimeAssistedMount bool
}

// parameter is one key: its values (none: any text), how it is kept, and
// whether this version does what a value says.
type parameter struct {
	values []string
	set    func(*Parameters, string)
	done   func(value string) bool
}

func always(string) bool { return true }

var parameters = map[string]parameter{
	"pool":         {nil, func(p *Parameters, v string) { p.Pool = v }, always},
	"provisioning": {[]string{"thin", "thick"}, func(p *Parameters, v string) { p.Thick = v == "thick" }, always},
	"fsGroupStrategy": {[]string{"chown", "idmap", "option"}, func(p *Parameters, v string) { p.FSGroupStrategy = v },
		func(string) bool { return false }},
	"fsGroupChangePolicy": {[]string{"Always", "OnRootMismatch"}, func(p *Parameters, v string) { p.FSGroupChangePolicy = v },
		func(string) bool { return false }},
	"recursiveReadOnly": {[]string{"Disabled", "IfPossible", "Enabled"}, func(p *Parameters, v string) { p.RecursiveReadOnly = v },
		func(v string) bool { return v != "Enabled" }},
	"allowRuntimeAssistedMount": {[]string{"true", "false"}, func(p *Parameters, v string) { p.AllowRuntimeAssistedMount = v == "true" },
		func(v string) bool { return v == "false" }},
}

// orchestratorPrefix is that of keys which Kubernetes adds for drivers' information.
const orchestratorPrefix = "csi.storage.k8s.io/"

// ParseParameters reads the parameters of a StorageClass. A key or value that
// has no meaning is an error, and so is one whose meaning this version does not
// carry out: nothing is ignored.
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
	if !def.done(value) {
		return fault.New(fault.Invalid, "parameter %s=%q is understood, but this version of the driver does not carry it out yet; leave it out", key, value)
	}
	def.set(p, value)
	return nil
}

// checkAttributes looks at a volume context. Keys with a domain are other
// people's (kubelet, sidecars) and pass; those without are ours.
func checkAttributes(m map[string]string) error {
	var p Parameters
	for _, key := range sortedKeys(m) {
		switch {
		case strings.Contains(key, "/"), key == static.AttrDevice, key == static.AttrServer, key == static.AttrShare:
			continue
		}
		if err := p.set(key, m[key]); err != nil {
			return err
		}
	}
	return nil
}

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
