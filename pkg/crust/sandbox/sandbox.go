// Package sandbox is the core of the CRUST server. It records who has which volume, gives none out
// twice, and finds everything again after a crash. [Server] is its gRPC transport. The packages
// below it are the backends that mount.
package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// Volume is a file system to mount in a sandbox.
type Volume struct {
	// Device on the host.
	Device mounter.Device
	// Target is the host path that containers' mount sources name.
	Target string
	// Type of the file system; the sandbox must support it.
	Type     string
	Options  mounter.Options
	ReadOnly bool
	Group    *uint32 // the pod's fsGroup
	Policy   ownership.Policy
	// Readers are other sandboxes of this server that read it, too.
	Readers []Sandbox
}

// Serial returns a short name of the volume, the same for the same device. It has at most 36 bytes,
// the limit of a virtio-scsi disk.
func (v Volume) Serial() string {
	sum := sha256.Sum256([]byte(v.Device.Path))
	return "crust-" + hex.EncodeToString(sum[:12])
}

// InUse reports whether somebody on this host uses the volume's device, which may have lost its name, or lead to another by now. A device
// that is gone is not in use.
func (v Volume) InUse() (bool, error) {
	const nodes = "/dev"
	return v.Device.Held(nodes)
}

// Place is where a volume is inside its sandbox.
type Place struct {
	Device, Path string
	// Pending: the sandbox has the volume, and mounts it when a container of it starts. It holds the device from now on
	// (mounter.Hold), because a device that is not in use may be given to others. Path is where the volume will be. Until it is
	// mounted, Stats and Expand are a fault Unavailable. A repeated Publish reports whether the volume is mounted.
	Pending bool `json:"-"`
}

// Opening is a sandbox to open.
type Opening struct {
	Spec
	// Ended is closed when the sandbox's process ends.
	Ended <-chan struct{}
	// Volumes that an earlier process published in it, completely or in part. If there are any, the sandbox's resources must exist.
	Volumes []Volume
}

// Backend connects to sandboxes of one kind.
type Backend interface {
	// Kind is the name of the backend's field in a RegisterSandboxRequest.
	Kind() string
	// Registration returns what a request says about how to reach a sandbox; see NewSpec. It returns nil if the request does not
	// say it and the backend cannot reach a sandbox by its process alone.
	Registration(r *crustv1alpha1.RegisterSandboxRequest) any
	// Capabilities are what its sandboxes really support.
	Capabilities() []crust.Capability
	// FileSystems asks its sandboxes' kernel what it can mount. It returns none if that is not
	// known yet.
	FileSystems(ctx context.Context) ([]string, error)
	// Mounts tells, without a query, whether its sandboxes can mount a file system; true if
	// unknown.
	Mounts(fstype string) bool
	// Grows tells whether its sandboxes can grow a file system while it is mounted.
	Grows(fstype string) bool
	// Process finds the process of a sandbox that was registered without one; 0 if there is none.
	Process(ctx context.Context, spec Spec) (pid int, err error)
	// Open opens a sandbox, new or of an earlier process.
	Open(ctx context.Context, o Opening) (Sandbox, error)
	// Forget removes what an ended sandbox left on this host.
	Forget(spec Spec) error
	// Close is for the end of this process. Sandboxes go on.
	Close() error
}

// unreachable stands for a sandbox of an earlier process that cannot be reached and has not
// provably ended. It may still use its volumes, so nobody else gets them.
type unreachable struct{ err error }

func (u unreachable) failed() error {
	return fault.New(fault.State, "the sandbox cannot be reached (%w): it is tried again; end it, or make it reachable", u.err)
}
func (u unreachable) Publish(context.Context, Volume) (Place, error) { return Place{}, u.failed() }
func (u unreachable) Unpublish(context.Context, Volume) error        { return u.failed() }
func (u unreachable) Stats(context.Context, Volume) (mounter.Usage, string, error) {
	return mounter.Usage{}, "", u.failed()
}
func (u unreachable) Expand(context.Context, Volume, int64) error             { return u.failed() }
func (u unreachable) Resolve(context.Context, Volume, string) (string, error) { return "", u.failed() }
func (u unreachable) MountNamespace() string                                  { return "" }
func (u unreachable) Close() error                                            { return u.failed() }
func (u unreachable) Detach()                                                 {}

// departed stands for an ended sandbox that cannot be opened any more. A volume that is still in
// use keeps its record: a process of the sandbox may live on with a copy of the mount.
type departed struct {
	unreachable
	forget func() error
}

func (d departed) Unpublish(_ context.Context, v Volume) error {
	if v.ReadOnly {
		return nil // another sandbox may read it too, so the device proves nothing; one that writes needs it to be free
	}
	busy, err := v.InUse()
	if err == nil && busy {
		err = fault.New(fault.State, "the sandbox has ended, and %s is still in use%s", v.Device.Path, mounter.HeldBy(v.Device).After("; "))
	}
	return err
}
func (d departed) Close() error { return d.forget() }

// Sandbox mounts volumes. No two of its methods run at once for one volume, except Stats: it runs beside
// any, because it may hang. Every method can be repeated.
type Sandbox interface {
	// Publish attaches and mounts a volume, unless already done. See Untouched.
	Publish(ctx context.Context, v Volume) (Place, error)
	// Unpublish undoes Publish, or what a failed Publish left.
	Unpublish(ctx context.Context, v Volume) error
	// Stats asks the sandbox's kernel. ailment says what is wrong with the file system, if
	// anything.
	Stats(ctx context.Context, v Volume) (u mounter.Usage, ailment string, err error)
	// Expand grows the file system to the device's size, in bytes.
	Expand(ctx context.Context, v Volume, deviceSize int64) error
	// Resolve returns a path inside the sandbox that shows sub, which is relative to the volume's
	// root. The path leads nowhere else. Directories that are missing are made, as a kubelet makes those of a subPath: of root, with
	// the permissions of the volume's root.
	Resolve(ctx context.Context, v Volume, sub string) (string, error)
	// MountNamespace is a path of the sandbox's mount namespace, valid while this process runs;
	// empty if it has none on this kernel.
	MountNamespace() string
	// Close releases what belongs to the sandbox itself, not to its volumes.
	Close() error
	// Detach disconnects from the sandbox without changing it, for the end of this process.
	Detach()
}

// Untouched marks an error of Sandbox.Publish that came before anything was done. Unpublish is not called then: it may ask whether the
// device is free, and the device may be somebody else's.
func Untouched(err error) error { return untouched{err} }

type untouched struct{ error }

func (u untouched) Unwrap() error { return u.error }

// Execer is a Sandbox that can run a program, for tests and for inspection.
type Execer interface {
	// Exec returns the program's output and exit code.
	Exec(ctx context.Context, argv []string, stdin []byte) (out []byte, code int, err error)
}

// Binder is a Sandbox with slots: directories that containers get when they start, and in which volumes appear later. See crust.SlotsDir.
// Unpublish empties the slots that show the volume.
type Binder interface {
	// PrepareSlot returns the path of a slot inside the sandbox. It makes the slot, empty, unless there is one.
	PrepareSlot(ctx context.Context, slot string) (string, error)
	// Bind shows the directory sub, relative to the volume's root, in a slot. A slot that shows something else is a fault Exists,
	// and one that was not prepared a fault State.
	Bind(ctx context.Context, slot string, v Volume, sub string, readOnly bool) error
	// Unbind empties a slot, unless it is empty. A volume that a container uses there stays, which is a fault State.
	Unbind(ctx context.Context, slot string) error
}

// BasicCapabilities are those of a backend that mounts with pkg/mounter.
func BasicCapabilities(labels bool) []crust.Capability {
	list := []crust.Capability{
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
		crustv1alpha1.RuntimeCapability_RPC_SUBPATH, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS,
		crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE,
	}
	if labels {
		list = append(list, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT)
	}
	return list
}
