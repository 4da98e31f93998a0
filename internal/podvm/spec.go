package podvm

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/crust-csi/crust-csi/internal/podguest"
)

// object is a part of a config.json of the OCI runtime specification.
type object = map[string]any

func sub(o object, name string) object  { v, _ := o[name].(object); return v }
func list(o object, name string) []any  { v, _ := o[name].([]any); return v }
func text(o object, name string) string { v, _ := o[name].(string); return v }

// namespaces returns a container's namespaces by type, with their paths.
func namespaces(config object) map[string]string {
	found := map[string]string{}
	for _, n := range list(sub(config, "linux"), "namespaces") {
		n, _ := n.(object)
		found[text(n, "type")] = text(n, "path")
	}
	return found
}

// refused says why a container cannot run in a microVM, nil if it can.
func refused(config object, isSandbox bool) error {
	ns := namespaces(config)
	for _, n := range []struct{ kind, why string }{
		{"network", "hostNetwork: a microVM has no network but its pod's"},
		{"ipc", "hostIPC: a microVM shares no memory with the host"},
		{"pid", "hostPID: a microVM does not see the processes of the host"},
	} {
		if _, ok := ns[n.kind]; !ok {
			return fmt.Errorf("the pod has %s", n.why)
		}
	}
	if isSandbox {
		return nil
	}
	for _, l := range list(sub(sub(config, "linux"), "resources"), "hugepageLimits") {
		// A kubelet gives 0 for each size that was not asked for.
		if l, _ := l.(object); fmt.Sprint(l["limit"]) != "0" {
			return fmt.Errorf("the container has huge pages (%v), which a microVM does not have", l["pageSize"])
		}
	}
	for kind, hooks := range sub(config, "hooks") {
		if h, _ := hooks.([]any); len(h) > 0 {
			return fmt.Errorf("the container has %s hooks, which would run on the host and not in the microVM", kind)
		}
	}
	return nil
}

// forGuest returns a container's config.json for the guest's runc. place says where the guest has a mount's source.
func forGuest(config object, container string, place func(mount object) (string, error)) ([]byte, error) {
	mounts := []any{}
	for _, m := range list(config, "mounts") {
		m, _ := m.(object)
		m = maps.Clone(m)
		if isBind(m) {
			source, err := place(m)
			if err != nil {
				return nil, fmt.Errorf("mount at %s: %w", text(m, "destination"), err)
			}
			m["source"] = source
		}
		delete(m, "uidMappings") // the host maps what it shares; in the guest's volumes, ids are the pod's
		delete(m, "gidMappings")
		mounts = append(mounts, m)
	}
	linux := object{}
	for _, name := range []string{"seccomp", "rootfsPropagation", "maskedPaths", "readonlyPaths", "personality"} {
		if v, ok := sub(config, "linux")[name]; ok {
			linux[name] = v
		}
	}
	// The containers of a pod share the guest's own network, IPC and UTS namespaces.
	kinds := []any{object{"type": "mount"}, object{"type": "pid"}}
	if _, ok := namespaces(config)["cgroup"]; ok {
		kinds = append(kinds, object{"type": "cgroup"})
	}
	linux["namespaces"] = kinds
	linux["cgroupsPath"] = filepath.Join(podguest.CgroupsPath, container)
	resources := object{}
	for _, name := range []string{"memory", "pids", "unified"} {
		if v, ok := sub(sub(config, "linux"), "resources")[name]; ok {
			resources[name] = v
		}
	}
	// Rules for block devices have the host's numbers. The guest adds its own for raw block volumes.
	rules := []any{}
	for _, r := range list(sub(sub(config, "linux"), "resources"), "devices") {
		r, _ := r.(object)
		const another = 1<<32 - 1 // no device has this number
		all := names(r, "major", another) && names(r, "minor", another)
		if kind := text(r, "type"); kind == "c" || kind != "b" && all {
			rules = append(rules, r)
		}
	}
	resources["devices"] = rules
	if cpu := maps.Clone(sub(sub(sub(config, "linux"), "resources"), "cpu")); cpu != nil {
		// These number the host's processors and memory nodes.
		delete(cpu, "cpus")
		delete(cpu, "mems")
		resources["cpu"] = cpu
	}
	linux["resources"] = resources
	return json.Marshal(object{
		"ociVersion": ociVersion, "process": processForGuest(sub(config, "process")), "mounts": mounts, "linux": linux,
		"root": object{"path": filepath.Join(podguest.Shared, container, "rootfs"), "readonly": sub(config, "root")["readonly"] == true},
	})
}

// ociVersion is one that runc 1.1 knows.
const ociVersion = "1.0.2"

// processForGuest drops the labels of the host's security modules, and sets what would otherwise be that of the guest's agent: the kernel
// never kills that for want of memory.
func processForGuest(process object) object {
	p := maps.Clone(process)
	if p == nil {
		p = object{}
	}
	delete(p, "selinuxLabel")
	delete(p, "apparmorProfile")
	if _, ok := p["oomScoreAdj"]; !ok {
		p["oomScoreAdj"] = 0
	}
	return p
}

func isBind(mount object) bool {
	options := list(mount, "options")
	return text(mount, "source") != "" && (text(mount, "type") == "bind" || slices.Contains(options, any("bind")) ||
		slices.Contains(options, any("rbind")))
}

// accessOf reads a mount's options and mappings. Of options that contradict each other, the last holds.
func accessOf(mount object) (a access, err error) {
	for _, o := range list(mount, "options") {
		switch o {
		case "ro", "rro":
			a.readOnly = true
		case "rw", "rrw":
			a.readOnly = false
		case "slave", "rslave", "shared", "rshared":
			a.follows = true
		case "private", "rprivate", "unbindable", "runbindable":
			a.follows = false
		}
	}
	if len(list(mount, "uidMappings"))+len(list(mount, "gidMappings")) > 0 {
		a.users, err = mapping(mount)
	}
	return a, err
}

// forStub returns the config.json of a container's stub on the host: a container with nothing but this program and the pod's socket.
func (p *Pod) forStub(config object, container string) ([]byte, error) {
	bind := func(at, source string) object {
		return object{"destination": at, "type": "bind", "source": source, "options": []string{"bind", "ro", "nosuid", "nodev"}}
	}
	program, err := ownProgram()
	if err != nil {
		return nil, err
	}
	resources := object{"devices": []any{object{"allow": false, "access": "rwm"}}}
	if shares, ok := sub(sub(sub(config, "linux"), "resources"), "cpu")["shares"]; ok {
		resources["cpu"] = object{"shares": shares}
	}
	ns := []any{}
	for kind, path := range namespaces(config) {
		if kind == "user" {
			continue // of a pod with hostUsers: false; the stub's files are root's
		}
		n := object{"type": kind}
		if kind == "ipc" || kind == "uts" {
			n["path"] = path
			if path == "" {
				delete(n, "path")
			}
		}
		ns = append(ns, n) // network: an empty one
	}
	return json.Marshal(object{
		"ociVersion": config["ociVersion"], "annotations": config["annotations"],
		"process": stubProcess(sub(config, "process"), "CRUST_CONTAINER="+container),
		"root":    object{"path": p.at("stub"), "readonly": true},
		"mounts": []any{
			object{"destination": "/proc", "type": "proc", "source": "proc", "options": []string{"nosuid", "noexec", "nodev"}},
			object{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755", "size=64k"}},
			object{"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": []string{"nosuid", "noexec", "newinstance",
				"ptmxmode=0666", "mode=0620"}},
			bind("/crust-oci", program), bind("/pod.sock", p.at(stubSocket)),
		},
		"linux": object{
			"namespaces": ns, "cgroupsPath": sub(config, "linux")["cgroupsPath"], "resources": resources,
			"maskedPaths": sub(config, "linux")["maskedPaths"], "readonlyPaths": sub(config, "linux")["readonlyPaths"],
		},
	})
}

// stubProcess is the process that stands for another: with its terminal, and without any of its rights.
func stubProcess(process object, who string) object {
	p := object{
		"args": []string{"/crust-oci", StubCommand}, "env": []string{who}, "cwd": "/", "noNewPrivileges": true,
		"user": object{"uid": 0, "gid": 0},
	}
	for _, name := range []string{"terminal", "consoleSize", "oomScoreAdj"} {
		if v, ok := process[name]; ok {
			p[name] = v
		}
	}
	return p
}
