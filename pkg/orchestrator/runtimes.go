package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// runtimes are the CRUST servers that RuntimeClasses name.
type runtimes struct {
	options []grpc.DialOption
	mu      sync.Mutex
	m       map[string]*crust.Client
}

func (r *runtimes) client(socket string) (*crust.Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.m[socket]; ok {
		return c, nil
	}
	c, err := crust.DialWith(socket, r.options)
	if err != nil {
		return nil, err
	}
	if r.m == nil {
		r.m = map[string]*crust.Client{}
	}
	r.m[socket] = c
	return c, nil
}

func (r *runtimes) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, c := range r.m {
		errs = append(errs, c.Close())
	}
	clear(r.m) // a hook may still come
	return errors.Join(errs...)
}

// supports asks a runtime's capabilities and file systems.
func (r *runtimes) supports(ctx context.Context, socket string) (
	list []crust.Capability, filesystems *crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, err error,
) {
	c, err := r.client(socket)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	caps, err := c.RuntimeGetCapabilities(ctx, &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	if err != nil {
		return nil, nil, err
	}
	for _, v := range caps.GetCapabilities() {
		list = append(list, v.GetRpc().GetType())
	}
	filesystems, err = c.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	return list, filesystems, err
}

// unimplemented drops Unimplemented: a runtime with its own sandboxes serves no SandboxManagement.
func unimplemented(err error) error {
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	return err
}

// registerTimeout bounds how long registering a sandbox may take.
const registerTimeout = 90 * time.Second

// register registers a pod's sandbox with a runtime. If another sandbox has d's volume, it
// deregisters that first. A pod's volumes do this at once, so callers ask a busy runtime again.
func (r *runtimes) register(ctx context.Context, d Deferral, b podSandbox) error {
	c, err := r.client(d.Socket)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	if d.Sandbox != "" && d.Sandbox != b.id {
		if _, err := c.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: d.Sandbox}); unimplemented(err) != nil {
			return fmt.Errorf("the pod's sandbox before this one: %w", err)
		}
	}
	// The server knows the kind of its sandboxes. Those before v0.2 want it named, and have mount namespaces.
	request := &crustv1alpha1.RegisterSandboxRequest{SandboxId: b.id, Pid: b.pid}
	_, err = c.RegisterSandbox(ctx, request)
	if status.Code(err) == codes.InvalidArgument {
		request.Kind = &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{}}
		if _, named := c.RegisterSandbox(ctx, request); status.Code(named) == codes.InvalidArgument {
			err = fmt.Errorf("%w; as a mount namespace: %w", err, named)
		} else {
			err = named
		}
	}
	return unimplemented(err)
}

// publish makes a runtime mount a deferred volume in a sandbox. If pending is true, the sandbox mounts it later.
func (r *runtimes) publish(ctx context.Context, d Deferral, sandbox string) (pending bool, err error) {
	c, err := r.client(d.Socket)
	if err != nil {
		return false, err
	}
	req := &crustv1alpha1.RuntimePublishVolumeRequest{
		SandboxId: sandbox, HostVolumeId: d.Source, HostTargetPath: d.Target, FileSystem: d.Type,
		FsgroupGid: d.Group, FsgroupPolicy: d.GroupPolicy,
		MountOptions: crust.OptionList(d.Options),
	}
	resp, err := c.RuntimePublishVolume(ctx, req)
	return resp.GetPending(), err
}

// unpublish makes it release the volume.
func (r *runtimes) unpublish(ctx context.Context, d Deferral) error {
	c, err := r.client(d.Socket)
	if err != nil {
		return err
	}
	_, err = c.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: d.Sandbox, HostVolumeId: d.Source})
	return unimplemented(err)
}

// deregister tells it that a sandbox ends.
func (r *runtimes) deregister(ctx context.Context, socket, sandbox string) error {
	c, err := r.client(socket)
	if err != nil {
		return err
	}
	_, err = c.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: sandbox})
	return unimplemented(err)
}
