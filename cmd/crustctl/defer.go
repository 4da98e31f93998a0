package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// deferred stages a volume and has the node leave it to the runtime; the runtime
// that cannot mount it is an error here, for a person asked for a sandbox.
func (g *globals) deferred(cmd *cobra.Command, runtime *crust.Client, v csiclient.Volume, target string, readOnly bool) (crust.MountInfo, error) {
	var info crust.MountInfo
	err := g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		fs, err := runtime.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		if err != nil {
			return err
		}
		if err := c.Stage(ctx, v); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return err
		}
		req := &csi.NodePublishVolumeRequest{
			VolumeId: v.ID, StagingTargetPath: c.StagingPath(v.ID), TargetPath: target, VolumeCapability: v.Capability(), Readonly: readOnly, VolumeContext: v.Context,
		}
		if err := crust.SetSupportedFilesystems(req, fs.GetFileSystems()); err != nil {
			return err
		}
		resp, err := c.NodePublishVolume(ctx, req)
		if err != nil {
			return err
		}
		var deferred bool
		info, deferred, err = crust.MountInfoOf(resp)
		if err == nil && !deferred {
			err = fmt.Errorf("the node mounted the volume itself: the runtime mounts %v, and the volume holds something else, or csi-node runs with --runtime-assisted-mounts=false; `crustctl volume unpublish %s %s`", fs.GetFileSystems(), v.ID, target)
		}
		return err
	})
	return info, err
}

func (g *globals) undefer(cmd *cobra.Command, id, target string) error {
	return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		if err := c.Unpublish(ctx, id, target); err != nil {
			return err
		}
		if err := c.Unstage(ctx, id); err != nil {
			return err
		}
		return g.done(cmd, "unpublished and unstaged", id, target)
	})
}

// expandDeferred enlarges the device of a deferred volume, and tells for whom the
// runtime is to grow the file system.
func (g *globals) expandDeferred(cmd *cobra.Command, id, target string, n int64) (source string, err error) {
	err = g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		r := &csi.CapacityRange{RequiredBytes: n}
		if _, err := c.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: r}); err != nil {
			return err
		}
		req := &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target, StagingTargetPath: c.StagingPath(id), CapacityRange: r}
		if err := crust.SetSupportsExpand(req, true); err != nil {
			return err
		}
		resp, err := c.NodeExpandVolume(ctx, req)
		if err != nil {
			return err
		}
		source, err = crust.ExpandSource(resp)
		return err
	})
	return source, err
}
