package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// diskSize, in bytes, is enough for every file system. The files are sparse.
var diskSize = fstype.LargestMinimum()

// disk is a loop device of the run's own, and the target of a volume on it.
type disk struct {
	r      *run
	loops  loopdev.Nodes
	loop   loopdev.Device
	file   string
	target string
	dirs   []string // below KubeletDir, outermost first
	sent   []string // sandboxes that it was published to
}

// with makes a disk for one check. A blank one has no file system.
func (r *run) with(ctx context.Context, blank bool, do func(d *disk) error) (err error) {
	if !blank && r.fs == "" {
		return notChecked("no file system can be made here and mounted there")
	}
	d := &disk{r: r, loops: loopdev.Nodes{Dir: "/dev"}}
	defer func() { r.left = errors.Join(r.left, d.remove(ctx)) }()
	if err := d.make(); err != nil {
		return err
	}
	if !blank {
		_, proof, err := superblock.ProveBlank(ctx, d.loop.Path, superblock.Reading{})
		if err != nil {
			return err
		}
		if err := fsprogs.New(nil).Format(ctx, proof, r.fs, false); err != nil {
			return err
		}
	}
	return do(d)
}

func (d *disk) make() error {
	f, err := os.CreateTemp(d.r.Scratch, "crust-conformance-")
	if err != nil {
		return err
	}
	d.file = f.Name()
	if err := errors.Join(f.Truncate(diskSize), f.Close()); err != nil {
		return err
	}
	if d.loop, err = d.loops.Attach(d.file, false); err != nil {
		return err
	}
	root, err := os.OpenRoot(d.r.KubeletDir)
	if err != nil {
		return err
	}
	defer root.Close()
	d.r.made++
	pod, below := fmt.Sprintf("crust-conformance-%d-%d", os.Getpid(), d.r.made), ""
	for _, part := range []string{"pods", pod, "volumes", "kubernetes.io~csi", "volume"} {
		below = filepath.Join(below, part)
		switch err := root.Mkdir(below, 0o750); {
		case err == nil:
			d.dirs = append(d.dirs, below)
		case !errors.Is(err, fs.ErrExist) || part != "pods":
			return err
		}
	}
	// The kubelet tells by this file whose volume it is.
	b, err := json.Marshal(map[string]string{"driverName": d.r.Driver})
	if err != nil {
		return err
	}
	d.target = filepath.Join(d.r.KubeletDir, below, "mount")
	return root.WriteFile(filepath.Join(below, "vol_data.json"), b, 0o600)
}

// remove takes the volume out of its sandboxes and removes the disk.
func (d *disk) remove(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var all error
	for _, id := range d.sent {
		if err := d.unpublish(ctx, id); err != nil && status.Code(err) != codes.Unimplemented {
			all = errors.Join(all, err)
		}
	}
	if d.loop.Path != "" {
		if err := d.loops.Detach(d.loop); err != nil {
			all = errors.Join(all, fmt.Errorf("%s stays until its sandbox ends: %w", d.loop.Path, err))
		}
	}
	if d.file != "" {
		all = errors.Join(all, os.Remove(d.file))
	}
	if len(d.dirs) == 0 {
		return all
	}
	root, err := os.OpenRoot(d.r.KubeletDir)
	if err != nil {
		return errors.Join(all, err)
	}
	defer root.Close()
	inner := d.dirs[len(d.dirs)-1]
	for _, name := range []string{filepath.Join(inner, "vol_data.json"), filepath.Join(inner, "mount")} {
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = errors.Join(all, err)
		}
	}
	for i := len(d.dirs) - 1; i >= 0; i-- {
		all = errors.Join(all, root.Remove(d.dirs[i])) // empty, or it is an error
	}
	return all
}

// enlarge doubles the device.
func (d *disk) enlarge() error {
	return errors.Join(os.Truncate(d.file, 2*diskSize), d.loop.SetCapacity())
}

func (d *disk) request(sandbox string, options ...string) *crustv1alpha1.RuntimePublishVolumeRequest {
	return &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: sandbox, HostVolumeId: d.loop.Path, HostTargetPath: d.target,
		FileSystem: d.r.fs, MountOptions: options}
}

// publish publishes the volume until the check ends.
func (d *disk) publish(ctx context.Context, req *crustv1alpha1.RuntimePublishVolumeRequest) (pending bool, err error) {
	if id := req.GetSandboxId(); id != "" && !slices.Contains(d.sent, id) {
		d.sent = append(d.sent, id) // also a call that fails may have made a part of it
	}
	resp, err := d.r.Client.RuntimePublishVolume(ctx, req)
	return resp.GetPending(), err
}

func (d *disk) unpublish(ctx context.Context, sandbox string) error {
	_, err := d.r.Client.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: sandbox, HostVolumeId: d.loop.Path})
	return err
}

// held expects that somebody has the device, or nobody.
func (d *disk) held(want bool) error {
	busy, err := mounter.Busy(d.loop.Path)
	if err == nil && busy != want {
		err = fmt.Errorf("%s must be %s", d.loop.Path, map[bool]string{true: "held by the sandbox", false: "free"}[want])
	}
	return err
}
