package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

func (r *run) checkCapabilities(ctx context.Context) error {
	resp, err := r.Client.RuntimeGetCapabilities(ctx, &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	if err != nil {
		return err
	}
	var all error
	for _, c := range resp.GetCapabilities() {
		kind := c.GetRpc().GetType()
		if kind == crustv1alpha1.RuntimeCapability_RPC_UNKNOWN || crustv1alpha1.RuntimeCapability_RPC_Type_name[int32(kind)] == "" {
			all = errors.Join(all, fmt.Errorf("the capability %d is unknown", kind))
		}
		if slices.Contains(r.capabilities, kind) {
			all = errors.Join(all, fmt.Errorf("the capability %s is there twice", kind))
		}
		r.capabilities = append(r.capabilities, kind)
	}
	return all
}

// checkFileSystems waits for a server that is asking its first guest.
func (r *run) checkFileSystems(ctx context.Context) error {
	for {
		resp, err := r.Client.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		if err != nil && status.Code(err) != codes.Unavailable {
			return err
		}
		if r.mounts = resp.GetFileSystems(); len(r.mounts) > 0 {
			r.grows = resp.GetGrowingFileSystems()
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server mounts none: %w", errors.Join(err, ctx.Err()))
		case <-time.After(100 * time.Millisecond):
		}
	}
	if len(r.grows) == 0 && r.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE) {
		r.grows = r.mounts
	}
	for _, list := range [][]string{r.mounts, r.grows} { // best one that grows
		for _, name := range slices.Backward(fstype.Formats()) {
			if slices.Contains(list, name) {
				r.fs = name
			}
		}
	}
	for _, name := range r.grows {
		if !slices.Contains(r.mounts, name) {
			return fmt.Errorf("%s grows, and is not mounted", name)
		}
	}
	return nil
}

func (r *run) checkArguments(ctx context.Context) error {
	return r.with(ctx, false, func(d *disk) error {
		var all error
		for what, change := range map[string]func(*crustv1alpha1.RuntimePublishVolumeRequest){
			"no sandbox_id":            func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.SandboxId = "" },
			"no host_volume_id":        func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.HostVolumeId = "" },
			"no host_target_path":      func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.HostTargetPath = "" },
			"no file_system":           func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.FileSystem = "" },
			"a relative target":        func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.HostTargetPath = "a/b" },
			"a target with \"..\"":     func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.HostTargetPath += "/../mount" },
			"a regular file as device": func(q *crustv1alpha1.RuntimePublishVolumeRequest) { q.HostVolumeId = d.file },
			"the policy Sometimes": func(q *crustv1alpha1.RuntimePublishVolumeRequest) {
				q.FsgroupGid, q.FsgroupPolicy = proto.Uint32(1), "Sometimes"
			},
		} {
			q := d.request(r.Sandbox)
			change(q)
			_, err := d.publish(ctx, q)
			all = errors.Join(all, code(what, err, codes.InvalidArgument))
		}
		return errors.Join(all, d.held(false))
	})
}

func (r *run) checkUnknownSandbox(ctx context.Context) error {
	return r.with(ctx, false, func(d *disk) error {
		const none = "crust-conformance-none"
		_, perr := r.Client.RuntimePublishVolume(ctx, d.request(none))
		all := errors.Join(code("publish", perr, codes.NotFound), d.held(false))
		if r.needs(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) == nil {
			_, err := r.Client.RuntimeGetVolumeStats(ctx,
				&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: none, HostVolumeId: d.loop.Path})
			all = errors.Join(all, code("stats", err, codes.NotFound))
		}
		return all
	})
}

func (r *run) checkUnknownFileSystem(ctx context.Context) error {
	return r.with(ctx, false, func(d *disk) error {
		q := d.request(r.Sandbox)
		q.FileSystem = "nofs"
		_, err := d.publish(ctx, q)
		return errors.Join(code("nofs", err, codes.InvalidArgument), d.held(false))
	})
}

func (r *run) checkBlank(ctx context.Context) error {
	if r.fs == "" {
		return notChecked("no file system can be made here and mounted there")
	}
	return r.with(ctx, true, func(d *disk) error {
		pending, err := d.publish(ctx, d.request(r.Sandbox))
		if pending {
			return notChecked("volumes are pending until a container starts")
		}
		if c := status.Code(err); c == codes.OK || c == codes.NotFound {
			return fmt.Errorf("the answer is %s", c)
		}
		return d.held(false)
	})
}

func (r *run) checkInUse(ctx context.Context) error {
	return r.with(ctx, false, func(d *disk) error {
		// As a file system that the host mounts.
		user, err := mounter.Hold(mounter.Device{Path: d.loop.Path, Major: d.loop.Major, Minor: d.loop.Minor})
		if err != nil {
			return err
		}
		_, err = d.publish(ctx, d.request(r.Sandbox))
		err = errors.Join(code("publish", err, codes.FailedPrecondition), user.Close(), d.held(false))
		if err != nil {
			return err
		}
		// A server that keeps something of the call answers ALREADY_EXISTS.
		if _, err := d.publish(ctx, d.request(r.Sandbox, "noatime")); err != nil {
			return fmt.Errorf("publish in another way after one that failed: %w", err)
		}
		return nil
	})
}

func (r *run) checkPublish(ctx context.Context) error {
	return r.published(ctx, func(d *disk, pending bool) error {
		again, err := d.publish(ctx, d.request(r.Sandbox))
		if err == nil && again && !pending {
			err = errors.New("it was mounted, and is pending now")
		}
		return errors.Join(d.held(true), err)
	})
}

// published publishes a new volume for one check.
func (r *run) published(ctx context.Context, do func(d *disk, pending bool) error) error {
	return r.with(ctx, false, func(d *disk) error {
		pending, err := d.publish(ctx, d.request(r.Sandbox))
		if err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		return do(d, pending)
	})
}

func (r *run) checkOtherTarget(ctx context.Context) error {
	return r.published(ctx, func(d *disk, _ bool) error {
		q := d.request(r.Sandbox)
		q.HostTargetPath += "2"
		_, err := r.Client.RuntimePublishVolume(ctx, q)
		return code("publish", err, codes.AlreadyExists)
	})
}

func (r *run) checkOtherSandbox(ctx context.Context) error {
	if r.Other == "" {
		return notChecked("no second sandbox was named")
	}
	return r.published(ctx, func(d *disk, _ bool) error {
		_, err := d.publish(ctx, d.request(r.Other))
		return code("publish", err, codes.FailedPrecondition)
	})
}

func (r *run) stats(ctx context.Context, d *disk) (bytes *crustv1alpha1.VolumeUsage, err error) {
	resp, err := r.Client.RuntimeGetVolumeStats(ctx,
		&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: r.Sandbox, HostVolumeId: d.loop.Path})
	if err != nil {
		return nil, err
	}
	for _, u := range resp.GetUsage() {
		if u.GetUnit() == crustv1alpha1.VolumeUsage_BYTES {
			bytes = u
		}
	}
	if resp.GetVolumeCondition() == nil || resp.GetVolumeCondition().GetAbnormal() {
		return bytes, fmt.Errorf("the condition of a new volume is %v", resp.GetVolumeCondition())
	}
	return bytes, nil
}

func (r *run) checkStats(ctx context.Context) error {
	if err := r.needs(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS); err != nil {
		return err
	}
	return r.published(ctx, func(d *disk, pending bool) error {
		u, err := r.stats(ctx, d)
		if pending {
			return code("a volume that is pending", err, codes.Unavailable)
		}
		if err != nil {
			return err
		}
		total, used, available := u.GetTotal(), u.GetUsed(), u.GetAvailable()
		if total <= 0 || total > diskSize || used < 0 || available <= 0 || used+available > total {
			return fmt.Errorf("a volume of %d bytes has %v", diskSize, u)
		}
		_, err = r.Client.RuntimeGetVolumeStats(ctx,
			&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: r.Sandbox, HostVolumeId: d.loop.Path + "0000"})
		return code("a volume that was not published", err, codes.NotFound)
	})
}

func (r *run) expand(ctx context.Context, d *disk, size int64) (int64, error) {
	resp, err := r.Client.RuntimeExpandVolume(ctx,
		&crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: r.Sandbox, HostVolumeId: d.loop.Path, RequiredBytes: size})
	return resp.GetCapacityBytes(), err
}

func (r *run) checkGrowth(ctx context.Context) error {
	if !slices.Contains(r.grows, r.fs) {
		return notChecked("the server grows none of the file systems that can be made here")
	}
	return r.published(ctx, func(d *disk, pending bool) error {
		if pending {
			_, err := r.expand(ctx, d, diskSize)
			return code("a volume that is pending", err, codes.Unavailable)
		}
		_, err := r.expand(ctx, d, 2*diskSize)
		if err := code("more than the device has", err, codes.OutOfRange); err != nil {
			return err
		}
		if err := d.enlarge(); err != nil {
			return err
		}
		size, err := r.expand(ctx, d, 2*diskSize)
		if err != nil || size != 2*diskSize {
			return fmt.Errorf("to %d bytes: it has %d, %v", 2*diskSize, size, err)
		}
		if r.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) {
			if u, err := r.stats(ctx, d); err != nil || u.GetTotal() <= diskSize {
				return fmt.Errorf("it grew to %d bytes, and has %v, %v", size, u, err)
			}
		}
		return nil
	})
}

func (r *run) checkReadOnly(ctx context.Context) error {
	if !slices.Contains(r.grows, r.fs) {
		return notChecked("the server grows none of the file systems that can be made here")
	}
	return r.with(ctx, false, func(d *disk) error {
		pending, err := d.publish(ctx, d.request(r.Sandbox, "ro"))
		if err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		if pending {
			return notChecked("volumes are pending until a container starts")
		}
		_, err = r.expand(ctx, d, 0)
		return code("growth", err, codes.FailedPrecondition)
	})
}

func (r *run) checkGroup(ctx context.Context) error {
	if err := r.needs(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH); err != nil {
		return err
	}
	return r.with(ctx, false, func(d *disk) error {
		q := d.request(r.Sandbox)
		q.FsgroupGid, q.FsgroupPolicy = proto.Uint32(4321), "OnRootMismatch"
		_, err := d.publish(ctx, q)
		return err
	})
}

func (r *run) checkResolve(ctx context.Context) error {
	return r.published(ctx, func(d *disk, pending bool) error {
		resolve := func(source string) (*crustv1alpha1.ResolveMountResponse, error) {
			return r.Client.ResolveMount(ctx, &crustv1alpha1.ResolveMountRequest{SandboxId: r.Sandbox, Source: source})
		}
		at, err := resolve(d.target)
		if status.Code(err) == codes.Unimplemented {
			return notChecked("the server has no ResolveMount")
		}
		if err != nil || at.GetForeign() || at.GetPath() == "" {
			return fmt.Errorf("the target is at %v, %w", at, err)
		}
		var all error
		for _, source := range []string{d.target + "2", d.target + "/..", "/etc/passwd", "/"} {
			if at, err := resolve(source); err != nil || !at.GetForeign() || at.GetPath() != "" {
				all = errors.Join(all, fmt.Errorf("%s is none of the volume's, and is at %v, %w", source, at, err))
			}
		}
		at, err = resolve(d.target + "/none/below")
		switch makes := r.supports(crustv1alpha1.RuntimeCapability_RPC_SUBPATH) && !pending; {
		case makes && (err != nil || at.GetForeign() || at.GetPath() == ""):
			all = errors.Join(all, fmt.Errorf("a subPath that the volume does not have is not made: %v, %w", at, err))
		case !makes && err == nil:
			all = errors.Join(all, fmt.Errorf("what is not in the volume is at %v", at))
		}
		return all
	})
}

func (r *run) checkList(ctx context.Context) error {
	return r.published(ctx, func(d *disk, pending bool) error {
		list, err := r.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
		if status.Code(err) == codes.Unimplemented {
			return notChecked("the server has no ListSandboxes")
		}
		if err != nil {
			return err
		}
		want := crust.StatePublished
		if pending {
			want = crust.StatePending
		}
		for _, s := range list.GetSandboxes() {
			for _, v := range s.GetVolumes() {
				if s.GetSandboxId() == r.Sandbox && v.GetHostVolumeId() == d.loop.Path {
					if v.GetHostTargetPath() != d.target || v.GetFileSystem() != r.fs || v.GetState() != want {
						return fmt.Errorf("it is listed as %v", v)
					}
					return nil
				}
			}
		}
		return fmt.Errorf("%s is not listed", d.loop.Path)
	})
}

func (r *run) checkUnpublish(ctx context.Context) error {
	return r.published(ctx, func(d *disk, _ bool) error {
		for range 2 {
			err := d.unpublish(ctx, r.Sandbox)
			if status.Code(err) == codes.Unimplemented {
				return notChecked("the server has no UnpublishVolume: a volume leaves when its sandbox ends")
			}
			if err != nil {
				return err
			}
		}
		all := d.held(false)
		if r.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) {
			_, err := r.stats(ctx, d)
			all = errors.Join(all, code("its stats", err, codes.NotFound))
		}
		return all
	})
}
