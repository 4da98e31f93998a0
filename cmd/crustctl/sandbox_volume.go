package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// sandboxPublish does what an orchestrator does with a volume that may be deferred: it decides, publishes on the node, and then in the
// sandbox.
func sandboxPublish(g *globals) *cobra.Command {
	var u useFlags
	var readOnly bool
	var group int64
	c := &cobra.Command{Use: "publish ID VOLUME TARGET", Short: "Stage a volume and publish it to a sandbox, as a kubelet of KEP-2857 " +
		"would with a class that has allowRuntimeAssistedMount: \"true\"",
		Args: cobra.ExactArgs(3), RunE: func(cmd *cobra.Command, args []string) error {
			v, err := u.volume(args[1])
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("group") && (group < 0 || group >= 1<<32-1) {
				return fmt.Errorf("--group %d: a number from 0 to 4294967294", group)
			}
			v.Context = map[string]string{crust.AllowParameter: "true"}
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				if _, here, err := sandboxes(ctx, c, args[0]); err != nil {
					return err
				} else if here == nil {
					return fmt.Errorf("no sandbox %q (crustctl sandbox list); nothing was changed", args[0])
				}
				info, err := g.deferred(cmd, c, v, args[2], readOnly, cmd.Flags().Changed("group"))
				if err != nil {
					return err
				}
				req := &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: args[0], HostVolumeId: info.Source, HostTargetPath: args[2],
					FileSystem: info.Type}
				for k, value := range info.Options {
					req.MountOptions = append(req.MountOptions, strings.TrimSuffix(k+"="+value, "="))
				}
				if cmd.Flags().Changed("group") {
					gid := uint32(group)
					req.FsgroupGid = &gid
				}
				resp, err := c.RuntimePublishVolume(ctx, req)
				if err != nil {
					return fmt.Errorf("%w\nthe node keeps volume %s for sandboxes: repeat this, or `crustctl sandbox unpublish %s %s %s`",
						err, args[1], args[0], args[1], args[2])
				}
				did := "published in sandbox "
				if resp.GetPending() {
					did = "mounted when its container starts, in sandbox "
				}
				return g.done(cmd, did+args[0], args[1], fmt.Sprintf("%s (%s)", info.Source, info.Type))
			})
		}}
	u.add(c)
	c.Flags().BoolVar(&readOnly, "read-only", false, "publish read-only")
	c.Flags().Int64Var(&group, "group", 0, "the pod's fsGroup")
	return c
}

func sandboxUnpublish(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "unpublish ID VOLUME TARGET",
		Short: "Take a volume away from a sandbox and unstage it; the sandbox may have ended",
		Args:  cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				v, err := inSandbox(ctx, c, args[0], args[2])
				if err == nil {
					_, err = c.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{
						SandboxId: args[0], HostVolumeId: v.GetHostVolumeId()})
				}
				if err != nil && !errors.Is(err, errNothing) {
					return err
				}
				return g.undefer(cmd, args[1], args[2])
			})
		},
	}
}

func sandboxStats(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "stats ID TARGET", Short: "Tell how full a volume is, as the sandbox sees it", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				v, err := inSandbox(ctx, c, args[0], args[1])
				if err != nil {
					return err
				}
				r, err := c.RuntimeGetVolumeStats(ctx, &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: args[0],
					HostVolumeId: v.GetHostVolumeId()})
				if err != nil {
					return err
				}
				t := table{head: []string{"WHAT", "TOTAL", "USED", "AVAILABLE"}}
				for _, u := range r.GetUsage() {
					show := func(n int64) string { return fmt.Sprint(n) }
					if u.GetUnit() == crustv1alpha1.VolumeUsage_BYTES {
						show = size
					}
					t.rows = append(t.rows, []string{strings.ToLower(u.GetUnit().String()), show(u.GetTotal()), show(u.GetUsed()),
						show(u.GetAvailable())})
				}
				if r.GetVolumeCondition().GetAbnormal() {
					t.rows = append(t.rows, []string{"not well: " + r.GetVolumeCondition().GetMessage(), "", "", ""})
				}
				return g.print(cmd.OutOrStdout(), t, r)
			})
		},
	}
}

func sandboxExpand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "expand ID VOLUME TARGET SIZE",
		Short: "Grow a volume's device and its file system in a sandbox, while it is used",
		Args:  cobra.ExactArgs(4),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := parseSize(args[3])
			if err != nil {
				return err
			}
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				// A device does not shrink again, so check first that it can be used.
				v, err := inSandbox(ctx, c, args[0], args[2])
				if err != nil {
					return err
				}
				have, err := capabilities(ctx, c)
				if err != nil {
					return err
				}
				fs, err := c.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
				if err != nil {
					return err
				}
				if !crust.Grows(have, fs, v.GetFileSystem()) {
					return fmt.Errorf("the runtime does not grow %s while it is in use; nothing was changed: unpublish the volume, `crustctl volume "+
						"expand` it, and it is grown when it is next published", v.GetFileSystem())
				}
				source, err := g.expandDeferred(cmd, args[1], args[2], n)
				if err != nil {
					return err
				}
				r, err := c.RuntimeExpandVolume(ctx, &crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: args[0], HostVolumeId: source,
					RequiredBytes: n})
				if err != nil {
					return err
				}
				return g.done(cmd, "grown to "+size(r.GetCapacityBytes()), args[1], source)
			})
		},
	}
}

func sandboxBind(g *globals) *cobra.Command {
	var sub string
	var readOnly bool
	c := &cobra.Command{
		Use:   "bind ID SLOT TARGET",
		Short: "Bind a published volume to a slot, for containers that already run",
		Long: "Bind the volume that is published at TARGET to a slot, for containers that already run. Such a container has a mount " +
			"whose source is " + crust.SlotsDir + "/SLOT. The volume appears in the directory " + crust.SlotVolume + " of that mount.",
		Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				v, err := inSandbox(ctx, c, args[0], args[2])
				if err != nil {
					return err
				}
				if _, err = c.BindVolume(ctx, &crustv1alpha1.BindVolumeRequest{SandboxId: args[0], Slot: args[1],
					HostVolumeId: v.GetHostVolumeId(), SubPath: sub, ReadOnly: readOnly}); err != nil {
					return err
				}
				return g.done(cmd, "shown in slot "+args[1], args[0], v.GetHostVolumeId())
			})
		},
	}
	c.Flags().StringVar(&sub, "sub-path", "", "a directory of the volume instead of its root")
	c.Flags().BoolVar(&readOnly, "read-only", false, "the containers may not write there")
	return c
}

func sandboxUnbind(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "unbind ID SLOT", Short: "Empty a slot; refused while a container uses the volume there", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				if _, err := c.UnbindVolume(ctx, &crustv1alpha1.UnbindVolumeRequest{SandboxId: args[0], Slot: args[1]}); err != nil {
					return err
				}
				return g.done(cmd, "emptied slot "+args[1], args[0], "")
			})
		},
	}
}
