package conformance

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func (r *run) checkSlots(ctx context.Context) error {
	return r.published(ctx, func(d *disk, pending bool) error {
		const slot = "crust-conformance"
		at, err := r.Client.ResolveMount(ctx, &crustv1alpha1.ResolveMountRequest{SandboxId: r.Sandbox, Source: crust.SlotsDir + "/" + slot})
		if c := status.Code(err); c == codes.Unimplemented || c == codes.FailedPrecondition || at.GetForeign() {
			return notChecked("its sandboxes have no slots for containers that run")
		}
		if err != nil || at.GetPath() == "" {
			return fmt.Errorf("the slot is at %v, %w", at, err)
		}
		bind := func(slot, source string, readOnly bool) error {
			_, err := r.Client.BindVolume(ctx, &crustv1alpha1.BindVolumeRequest{
				SandboxId: r.Sandbox, Slot: slot, HostVolumeId: source, ReadOnly: readOnly})
			return err
		}
		unbind := func() error {
			_, err := r.Client.UnbindVolume(ctx, &crustv1alpha1.UnbindVolumeRequest{SandboxId: r.Sandbox, Slot: slot})
			return err
		}
		if pending {
			return code("a volume that is pending", bind(slot, d.loop.Path, false), codes.Unavailable)
		}
		all := errors.Join(
			code("a name with a dot", bind("a.b", d.loop.Path, false), codes.InvalidArgument),
			code("a volume that is not published", bind(slot, d.loop.Path+"0", false), codes.NotFound),
			code("a slot that nobody has", bind(slot+"-2", d.loop.Path, false), codes.FailedPrecondition),
			bind(slot, d.loop.Path, true), bind(slot, d.loop.Path, true),
			code("another access", bind(slot, d.loop.Path, false), codes.AlreadyExists),
			unbind(), unbind(), bind(slot, d.loop.Path, false))
		// The slot does not hold the volume.
		return errors.Join(all, d.unpublish(ctx, r.Sandbox), d.held(false))
	})
}
