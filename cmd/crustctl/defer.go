package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func capabilities(ctx context.Context, c *crust.Client) ([]crust.Capability, error) {
	r, err := c.RuntimeGetCapabilities(ctx, &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	var list []crust.Capability
	for _, v := range r.GetCapabilities() {
		list = append(list, v.GetRpc().GetType())
	}
	return list, err
}

// deferred stages a volume and has the node leave the mount to the runtime. A runtime that cannot
// mount it is an error here, because the user asked for a sandbox.
func (g *globals) deferred(
	cmd *cobra.Command, runtime *crust.Client, v csiclient.Volume, target string, readOnly, group bool,
) (crust.MountInfo, error) {
	var info crust.MountInfo
	err := g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		fs, err := runtime.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		if err != nil {
			return err
		}
		if len(fs.GetFileSystems()) == 0 {
			return errors.New(
				"crustd has met no guest yet, so it does not know what guests mount: wait until one has booted (crustctl sandbox " +
					"run); nothing was changed")
		}
		have, err := capabilities(ctx, runtime)
		if err != nil {
			return err
		}
		node, err := c.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		if err != nil {
			return err
		}
		defers := slices.ContainsFunc(node.GetCapabilities(),
			func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == crust.NodeCapability })
		if d := crust.Decide(crust.PodVolume{Socket: g.crust, Allowed: true, Exclusive: true, NodeDefers: defers, Capabilities: have,
			Filesystems: fs.GetFileSystems(), Block: v.Block, Group: group}); !d.Defer {
			return fmt.Errorf("%s; nothing was changed", d.Why)
		}
		if err := c.Stage(ctx, v); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return err
		}
		req := &csi.NodePublishVolumeRequest{
			VolumeId: v.ID, StagingTargetPath: c.StagingPath(v.ID), TargetPath: target, VolumeCapability: v.Capability(),
			Readonly:      readOnly,
			VolumeContext: v.Context,
		}
		if slices.Contains(have, crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL) {
			req.VolumeContext = map[string]string{crust.ContextKernel: "host"}
			maps.Copy(req.VolumeContext, v.Context)
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
			// Nobody asked for a mount on the host.
			err = errors.Join(fmt.Errorf("the node mounted the volume itself, for what is on it is none of %v; it was unpublished again",
				fs.GetFileSystems()),
				c.Unpublish(ctx, v.ID, target), c.Unstage(ctx, v.ID))
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

// expandDeferred enlarges the device of a deferred volume, and returns the source whose file system
// the runtime has to grow.
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
