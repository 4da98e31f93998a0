// Package kata is the backend for pods of an installed Kata Containers. It mounts nothing. It writes a record of a direct-assigned volume
// for Kata's runtime, which gives the device to the pod's virtual machine when a container starts, and whose agent mounts it there. So a
// volume is pending until then, and stays until the sandbox ends: no call of Kata's takes one out of a running machine.
//
// Kata fails open: a target without a record is shared with the machine as a directory of the host. crust-agent's placeholder at the
// target, which can be neither bound nor written to, is what keeps a pod's data from there.
//
// It follows the documents and sources of Kata's repository (docs/design/direct-blk-device-assignment.md): versions 3 and 4 of the runtime
// in Go, version 4 of that in Rust. It has not been run against a real Kata yet.
package kata

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// The runtimes of Kata. Their sandboxes can do different things with a direct-assigned volume.
const (
	// Go is containerd-shim-kata-v2 in Go: it gives a volume to a group and tells its statistics.
	Go = "go"
	// Rust is runtime-rs, the default since Kata 4.0: it does neither.
	Rust = "rust"
)

// Config says which Kata this node has.
type Config struct {
	// Runtime is Go or Rust.
	Runtime string
	// FileSystems are those that the kernel of Kata's guests has. They are unknown until a guest has run, so name them.
	FileSystems []string
	// Volumes is the directory of Kata's records of volumes; empty: Kata's own.
	Volumes string
	// Sandboxes is the directory that has a directory for each sandbox, with its management socket; empty: that of the Runtime.
	Sandboxes string
}

// Backend fronts an installed Kata.
type Backend struct {
	Config
	mu    sync.Mutex
	held  map[string]*device // by path
	boxes map[string]*box    // by id
}

// device is one that nobody else on this host may have.
type device struct {
	*os.File
	users int // sandboxes
}

// New returns a backend. A configuration that cannot be right is a fault Invalid.
func New(c Config) (*Backend, error) {
	sockets := map[string]string{Go: "/run/vc/sbs", Rust: "/run/kata"}
	if sockets[c.Runtime] == "" {
		return nil, fault.New(fault.Invalid, "the runtime %q of Kata: %s or %s", c.Runtime, Go, Rust)
	}
	if len(c.FileSystems) == 0 {
		return nil, fault.New(fault.Invalid, "name the file systems that the kernel of Kata's guests has")
	}
	for _, name := range c.FileSystems {
		if !slices.Contains(fstype.OnDevices(), name) {
			return nil, fault.New(fault.Invalid, "the file system %q of Kata's guests is unknown: give some of %s", name, strings.Join(fstype.OnDevices(), ", "))
		}
	}
	if c.Volumes == "" {
		c.Volumes = "/run/kata-containers/shared/direct-volumes"
	}
	if c.Sandboxes == "" {
		c.Sandboxes = sockets[c.Runtime]
	}
	return &Backend{Config: c, held: map[string]*device{}, boxes: map[string]*box{}}, nil
}

// Kind is "kata".
func (b *Backend) Kind() string { return "kata" }

// Registration returns nothing: Kata's files are found by the sandbox's id.
func (b *Backend) Registration(*crustv1alpha1.RegisterSandboxRequest) any { return struct{}{} }

// Capabilities are what Kata's runtime does with a direct-assigned volume. It grows none (its agent answers UNIMPLEMENTED), and has
// neither sub-paths nor labels of one.
func (b *Backend) Capabilities() []crust.Capability {
	if b.Runtime == Rust {
		return nil
	}
	return []crust.Capability{
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
		crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS,
	}
}

// FileSystems returns the configured ones.
func (b *Backend) FileSystems(context.Context) ([]string, error) {
	return slices.Clone(b.Config.FileSystems), nil
}

// Mounts tells whether a file system is configured.
func (b *Backend) Mounts(fstype string) bool { return slices.Contains(b.Config.FileSystems, fstype) }

// Grows returns false.
func (b *Backend) Grows(string) bool { return false }

// Process returns an error. Without a process the server could not see the sandbox end, and would never release its volumes.
func (b *Backend) Process(context.Context, sandbox.Spec) (int, error) {
	return 0, fault.New(fault.Invalid, "pid is missing: give that of the sandbox's hypervisor or shim, whose end is the sandbox's")
}

// Open holds the devices that an earlier process gave to the sandbox, unless it has ended. If one of them cannot be held, the others are
// from now on, and the next Open tries again.
func (b *Backend) Open(_ context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	b.mu.Lock()
	s := b.boxes[o.ID]
	if s == nil {
		s = &box{b: b, id: o.ID, ended: o.Ended, holds: map[string]bool{}}
		b.boxes[o.ID] = s
	}
	b.mu.Unlock()
	var errs []error
	for _, v := range o.Volumes {
		if err := s.hold(v); err != nil && !s.hasEnded() {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// Forget does nothing: the records of volumes are below /run, which is empty after a reboot.
func (b *Backend) Forget(sandbox.Spec) error { return nil }

// Close lets go of the devices of sandboxes that could not be opened.
func (b *Backend) Close() error {
	b.mu.Lock()
	left := slices.Collect(maps.Values(b.boxes))
	b.mu.Unlock()
	for _, s := range left {
		s.Detach()
	}
	return nil
}
