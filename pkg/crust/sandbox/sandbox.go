// Package sandbox is the CRUST server without its gRPC dress and without its
// sandboxes: who has which volume, that nobody has it twice, and that everything
// is found again after a crash. Packages below it do the mounting.
package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// Volume is a file system to be mounted in a sandbox.
type Volume struct {
	// Device on the host.
	Device mounter.Device
	// Target is the host path that containers' mount sources name.
	Target string
	// Type of the file system, one that the sandbox has.
	Type     string
	Options  mounter.Options
	ReadOnly bool
	Group    *uint32 // the pod's fsGroup
	Policy   ownership.Policy
	// Shared: another sandbox of this server reads it too.
	Shared bool
}

// Serial is a short name of the volume, the same for the same device: at most 36
// bytes, which is what a virtio-scsi disk can have.
func (v Volume) Serial() string {
	sum := sha256.Sum256([]byte(v.Device.Path))
	return "crust-" + hex.EncodeToString(sum[:12])
}

// Place is where a volume is inside its sandbox.
type Place struct{ Device, Path string }

// Opening is a sandbox that is to be taken up.
type Opening struct {
	Spec
	// Ended is closed when the sandbox's process has.
	Ended <-chan struct{}
	// Published: an earlier process mounted volumes in it, so what it needs to
	// have is there.
	Published bool
}

// Backend makes sandboxes of one kind reachable.
type Backend interface {
	// Kind is the backend's name: that of its field in a RegisterSandboxRequest.
	Kind() string
	// Registration gives what a request says about how a sandbox is reached: see NewSpec.
	Registration(r *crustv1alpha1.RegisterSandboxRequest) any
	// Capabilities are what its sandboxes really do.
	Capabilities() []crust.Capability
	// FileSystems are what its sandboxes' kernel can mount, asked of it; none where
	// that is not known yet.
	FileSystems(ctx context.Context) ([]string, error)
	// Mounts tells whether its sandboxes can mount a file system, without asking:
	// yes, too, where that is not known.
	Mounts(fstype string) bool
	// Process finds the process of a sandbox whose registration names none, 0 where
	// there is none to be found.
	Process(ctx context.Context, spec Spec) (pid int, err error)
	// Open takes up a sandbox, new or of an earlier process.
	Open(ctx context.Context, o Opening) (Sandbox, error)
	// Forget removes what a sandbox that has ended left here.
	Forget(spec Spec) error
	// Close is for the end of this process; sandboxes that are left go on.
	Close() error
}

// unreachable stands for a sandbox of an earlier process that cannot be reached
// and is not known to have ended: it may have its volumes still, so it keeps
// them from others.
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

// departed stands for a sandbox that has ended and cannot be opened any more. A
// volume that is in use all the same keeps its record: a process of the sandbox
// may live on with a copy of the mount.
type departed struct {
	unreachable
	forget func() error
}

func (d departed) Unpublish(_ context.Context, v Volume) error {
	busy, err := mounter.Busy(v.Device.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && busy {
		err = fault.New(fault.State, "the sandbox has ended, and %s is still in use%s", v.Device.Path, mounter.HeldBy(v.Device))
	}
	return err
}
func (d departed) Close() error { return d.forget() }

// Sandbox is where volumes are mounted. Of one volume no two methods run at
// once. Every method can be repeated.
type Sandbox interface {
	// Publish attaches and mounts a volume, or finds that done.
	Publish(ctx context.Context, v Volume) (Place, error)
	// Unpublish undoes that, or what a Publish that failed has left.
	Unpublish(ctx context.Context, v Volume) error
	// Stats asks the sandbox's kernel. ailment says what is wrong with the file
	// system, if anything.
	Stats(ctx context.Context, v Volume) (u mounter.Usage, ailment string, err error)
	// Expand grows the file system to the device's size, in bytes.
	Expand(ctx context.Context, v Volume, deviceSize int64) error
	// Resolve gives a path inside the sandbox that shows what lies at sub, which
	// is relative to the volume's root, and that leads nowhere else.
	Resolve(ctx context.Context, v Volume, sub string) (string, error)
	// MountNamespace is a path of the sandbox's mount namespace, for as long as
	// this process runs; empty where it has none on this kernel.
	MountNamespace() string
	// Close gives up everything that belongs to the sandbox and not to one of its
	// volumes.
	Close() error
	// Detach lets go of the sandbox without changing it, for the end of this
	// process.
	Detach()
}

// Execer is a Sandbox in which a program can be run, for tests and for who looks into it.
type Execer interface {
	// Exec gives what the program said, and its exit code.
	Exec(ctx context.Context, argv []string, stdin []byte) (out []byte, code int, err error)
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
