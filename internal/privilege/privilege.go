// Package privilege manages the capabilities of daemons that run as root: which they need and why,
// and how they drop all others.
//
// A privileged container, which Kubernetes requires for opening block devices, has every capability
// whatever its manifest drops: containerd and CRI-O then ignore capabilities.drop. So the daemons
// drop them themselves, before they do anything else, from the bounding set: no program that they
// start has them either.
package privilege

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// All, in place of a list, keeps every capability.
const All = "all"

// Need is a capability that a daemon needs.
type Need struct {
	Name string // without CAP_
	// Without describes what fails without it.
	Without string
	// Vital means that no volume can be mounted without it.
	Vital bool
}

// Needs are the needs of one daemon.
type Needs []Need

// Storage lists the needs of csi-node.
var Storage = Needs{
	{Name: "CHOWN", Without: "volumes cannot be given to a pod's fsGroup"},
	{Name: "DAC_OVERRIDE", Without: "files that belong to other users, on volumes and in pods' directories, cannot be reached",
		Vital: true},
	{Name: "FOWNER", Without: "the modes of files that belong to other users cannot be changed for a pod's fsGroup"},
	{Name: "FSETID", Without: "directories lose their setgid bit when they are given to a pod's fsGroup"},
	{Name: "MKNOD", Without: "devices that have no node in /dev cannot be opened: a /dev that is not the host's, or not all of it"},
	{Name: "SETFCAP", Without: "no user namespaces that map root, so no id-mapped mounts (fsGroupStrategy: idmap)"},
	{Name: "SETGID", Without: "no user namespaces, so no id-mapped mounts (fsGroupStrategy: idmap)"},
	{Name: "SETUID", Without: "no user namespaces, so no id-mapped mounts (fsGroupStrategy: idmap)"},
	{Name: "SYS_ADMIN", Without: "no device can be attached and nothing can be mounted", Vital: true},
	{Name: "SYS_CHROOT",
		Without: "other mount namespaces cannot be entered, so no volume can be formatted or checked, or deferred to a pod's sandbox"},
	{Name: "SYS_PTRACE", Without: "the host's mount namespace cannot be opened, and errors do not say which process holds a device"},
	{Name: "SYS_RESOURCE", Without: "ext4 does not grow while it is mounted, only when it is next staged"},
}

// Sandboxes lists the needs of crustd. It makes no user namespace.
var Sandboxes = slices.DeleteFunc(slices.Clone(Storage), func(n Need) bool {
	return slices.Contains([]string{"SETFCAP", "SETGID", "SETUID"}, n.Name)
})

// List returns the names in the syntax of the flag.
func (l Needs) List() string {
	var names []string
	for _, n := range l {
		names = append(names, n.Name)
	}
	return strings.Join(names, ",")
}

// Check validates a list.
func Check(list string) error {
	_, err := bits(list)
	return err
}

func bits(list string) (uint64, error) {
	if list == All {
		return ^uint64(0), nil
	}
	var set uint64
	for _, name := range strings.Split(list, ",") {
		number, ok := linux.CapabilityNumber(strings.TrimPrefix(strings.ToUpper(strings.TrimSpace(name)), "CAP_"))
		if !ok {
			return 0, fmt.Errorf("%q is no capability; give names of capabilities(7) with commas between them, or %s", name, All)
		}
		set |= 1 << number
	}
	return set, nil
}

// Keep drops every capability that is not in the list. If there are any, it restarts this program
// without them, and returns only if that failed. Nothing may have been opened or started yet.
func Keep(list string) error {
	keep, err := bits(list)
	if err != nil {
		return err
	}
	held, err := linux.CapabilitiesOf("/proc/thread-self/status", "CapBnd")
	if err != nil || held&^keep == 0 {
		return err
	}
	if effective, err := linux.CapabilitiesOf("/proc/thread-self/status", "CapEff"); err != nil || effective&^keep == 0 {
		return err // not root: it has none to drop
	}
	runtime.LockOSThread() // until execve: the bounding set belongs to a thread
	defer runtime.UnlockOSThread()
	for number := range 64 {
		if held&^keep&(1<<number) == 0 {
			continue
		}
		if err := linux.DropBounding(number); err != nil {
			return fmt.Errorf("capabilities that are not needed cannot be given back: %w; let this process have CAP_SETPCAP, or give "+
				"--capabilities=%s", err, All)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return linux.Exec(self, os.Args, os.Environ())
}

// Missing returns the needs that a process lacks, according to its status file, /proc/PID/status.
func (l Needs) Missing(statusFile string) (Needs, error) {
	held, err := linux.CapabilitiesOf(statusFile, "CapEff")
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(l), func(n Need) bool {
		number, _ := linux.CapabilityNumber(n.Name)
		return held&(1<<number) != 0
	}), nil
}

// Ready returns an error that names the vital capabilities that this process lacks.
func (l Needs) Ready() error {
	missing, err := l.Missing("/proc/self/status")
	if err != nil {
		return err
	}
	var words []string
	for _, n := range missing {
		if n.Vital {
			words = append(words, "CAP_"+n.Name+" is not held: without it, "+n.Without)
		}
	}
	if len(words) == 0 {
		return nil
	}
	return fmt.Errorf("%s; see --capabilities, and the container's or service's own limits", strings.Join(words, "; "))
}
