package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// group returns a command that only has subcommands: an unknown one is an error, for scripts.
func group(name, short string) *cobra.Command {
	return &cobra.Command{Use: name, Short: short, RunE: func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("unknown command %q for %q", args[0], c.CommandPath())
		}
		return c.Help()
	}}
}

func volumeCommand(g *globals) *cobra.Command {
	c := group("volume", "Make, publish, look at and delete volumes")
	c.AddCommand(createCommand(g), listCommand(g), publishCommand(g), unpublishCommand(g), statsCommand(g), showCommand(g),
		expandCommand(g), snapshotCommand(g), cloneCommand(g), deleteCommand(g))
	return c
}

// parseSize parses sizes such as 1073741824, 512Mi, 1Gi, 2Ti.
func parseSize(s string) (int64, error) {
	number, shift := s, 0
	for suffix, n := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40} {
		if cut, ok := strings.CutSuffix(s, suffix); ok {
			number, shift = cut, n
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > (1<<62)>>shift {
		return 0, fmt.Errorf("size %q: give a whole number of bytes, or one with Ki, Mi, Gi or Ti", s)
	}
	return n << shift, nil
}

func size(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
	default:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
}

type useFlags struct {
	v    csiclient.Volume
	mode string
}

func (u *useFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&u.v.FSType, "fs-type", "", "file system: "+strings.Join(fstype.Formats(), ", ")+
		" (default: the volume's or its origin's; of a new one, "+fstype.Default()+")")
	c.Flags().BoolVar(&u.v.Block, "block", false, "use it as a raw block device")
	c.Flags().StringVar(&u.mode, "access-mode", "SINGLE_NODE_WRITER", "CSI access mode")
}

func (u *useFlags) volume(id string) (csiclient.Volume, error) {
	mode, ok := csi.VolumeCapability_AccessMode_Mode_value[u.mode]
	if !ok {
		return csiclient.Volume{}, fmt.Errorf("--access-mode %q is not one of CSI's", u.mode)
	}
	u.v.ID, u.v.Mode = id, csi.VolumeCapability_AccessMode_Mode(mode)
	return u.v, nil
}

func createCommand(g *globals) *cobra.Command {
	var u useFlags
	var amount, from string
	var params map[string]string
	c := &cobra.Command{Use: "create NAME", Short: "Make a volume", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := parseSize(amount)
			if err != nil {
				return err
			}
			v, err := u.volume("")
			if err != nil {
				return err
			}
			// Read the parameter as the external provisioner reads a StorageClass.
			const fsTypeParameter = "csi.storage.k8s.io/fstype"
			if fstype, ok := params[fsTypeParameter]; ok && v.FSType == "" {
				v.FSType = fstype
			}
			var source *csi.VolumeContentSource
			if from != "" {
				source = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
					Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: from}}}
			}
			return g.create(cmd, args[0], n, v, params, source)
		}}
	u.add(c)
	c.Flags().StringVar(&amount, "size", "1Gi", "size")
	c.Flags().StringVar(&from, "from-snapshot", "", "id of a snapshot to restore")
	c.Flags().StringToStringVar(&params, "parameter", nil, "StorageClass parameter, KEY=VALUE")
	return c
}

func (g *globals) create(
	cmd *cobra.Command, name string, n int64, v csiclient.Volume, params map[string]string, source *csi.VolumeContentSource,
) error {
	return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		made, err := c.Create(ctx, name, n, v, params, source)
		if err != nil {
			return err
		}
		return g.print(cmd.OutOrStdout(),
			table{[]string{"VOLUME", "SIZE"}, [][]string{{made.GetVolumeId(), size(made.GetCapacityBytes())}}},
			made)
	})
}

func cloneCommand(g *globals) *cobra.Command {
	var u useFlags
	var amount string
	c := &cobra.Command{Use: "clone VOLUME NAME", Short: "Make a volume that is a copy of another", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			v, err := u.volume("")
			if err != nil {
				return err
			}
			var n int64
			if amount != "" {
				if n, err = parseSize(amount); err != nil {
					return err
				}
			}
			var origin string
			if err := g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				origin, err = idOf(ctx, c, args[0])
				return err
			}); err != nil {
				return err
			}
			return g.create(cmd, args[1], n, v, nil, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: origin}}})
		}}
	u.add(c)
	c.Flags().StringVar(&amount, "size", "", "size (default: the origin's)")
	return c
}

func publishCommand(g *globals) *cobra.Command {
	var u useFlags
	var readOnly bool
	var attrs map[string]string
	c := &cobra.Command{Use: "publish ID TARGET", Short: "Stage a volume and publish it at a path below --kubelet-dir",
		Args: cobra.ExactArgs(2), RunE: func(cmd *cobra.Command, args []string) error {
			v, err := u.volume(args[0])
			if err != nil {
				return err
			}
			v.Context = attrs
			// Check this before the volume is attached and formatted.
			if below, err := filepath.Rel(g.kubeletDir, args[1]); err != nil || !filepath.IsLocal(below) {
				return fmt.Errorf("target %s does not lie below --kubelet-dir %s", args[1], g.kubeletDir)
			}
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				if err := c.Stage(ctx, v); err != nil {
					return err
				}
				if err := c.Publish(ctx, v, args[1], readOnly); err != nil {
					// The driver refuses this while it is published elsewhere.
					_ = c.Unstage(ctx, v.ID)
					return err
				}
				return g.done(cmd, "published", args[0], args[1])
			})
		}}
	u.add(c)
	c.Flags().StringArrayVar(&u.v.MountFlags, "mount-option", nil, "mount options, as in a PersistentVolume; repeatable")
	c.Flags().BoolVar(&readOnly, "read-only", false, "publish read-only")
	c.Flags().StringVar(&u.v.Group, "group", "", "the pod's fsGroup, a number")
	c.Flags().StringToStringVar(&attrs, "attribute", nil, "volume attribute, KEY=VALUE (static volumes: device, server, share)")
	return c
}

func (g *globals) done(cmd *cobra.Command, what, id, detail string) error {
	return g.print(cmd.OutOrStdout(), table{[]string{"VOLUME", "STATE", "AT"}, [][]string{{id, what, detail}}},
		map[string]string{"volume": id, "state": what, "at": detail})
}

// missing returns a NotFound error if a volume or snapshot does not exist. CSI treats that as success, but the id may be a typo. If the
// driver does not have the pool, missing returns nil, and the driver decides.
func missing(ctx context.Context, c *csiclient.Client, id string) (err error) {
	pool, _, snapshot, ok := volume.ParseID(id)
	if ok {
		info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		if err != nil || !slices.Contains(strings.Split(info.GetManifest()["pools"], ","), pool) {
			return err
		}
	}
	if ok && snapshot {
		_, err = c.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id})
	} else {
		_, err = c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	}
	if status.Code(err) == codes.NotFound {
		return err
	}
	return nil
}

func unpublishCommand(g *globals) *cobra.Command {
	var keep bool
	c := &cobra.Command{Use: "unpublish ID TARGET", Short: "Take a volume off a path, and unstage it", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				if err := missing(ctx, c, args[0]); err != nil {
					return err
				}
				if err := c.Unpublish(ctx, args[0], args[1]); err != nil {
					return err
				}
				if keep {
					return g.done(cmd, "unpublished", args[0], args[1])
				}
				err := c.Unstage(ctx, args[0])
				if status.Code(err) == codes.FailedPrecondition {
					return g.done(cmd, "unpublished, still staged: "+status.Convert(err).Message(), args[0], args[1])
				}
				if err != nil {
					return err
				}
				return g.done(cmd, "unpublished and unstaged", args[0], args[1])
			})
		}}
	c.Flags().BoolVar(&keep, "keep-staged", false, "do not unstage: it is published elsewhere too")
	return c
}

func statsCommand(g *globals) *cobra.Command {
	return &cobra.Command{Use: "stats VOLUME [PATH]", Short: "Show how full a volume is, and its health", Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) (err error) {
				var id, path string
				var untold error // why the usage is unknown
				if len(args) == 1 {
					id, path, err = somewhere(ctx, c, args[0])
					if id != "" {
						untold, err = err, nil
					}
				} else {
					path = args[1]
					id, err = idOf(ctx, c, args[0])
				}
				if err != nil {
					return err
				}
				// Health may be all that is known of a volume in trouble.
				var s *csi.NodeGetVolumeStatsResponse
				if untold == nil {
					s, untold = c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
				}
				h, err := c.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path})
				if err != nil {
					return errors.Join(untold, err)
				}
				t := table{head: []string{"WHAT", "TOTAL", "USED", "AVAILABLE"}}
				for _, u := range s.GetUsage() {
					show := func(n int64) string { return strconv.FormatInt(n, 10) }
					if u.GetUnit() == csi.VolumeUsage_BYTES {
						show = size
					}
					row := []string{strings.ToLower(u.GetUnit().String()), show(u.GetTotal()), show(u.GetUsed()), show(u.GetAvailable())}
					if u.GetUsed() == 0 && u.GetAvailable() == 0 {
						row[2], row[3] = "-", "-" // of a device, only its size is known
					}
					t.rows = append(t.rows, row)
				}
				if len(h.GetVolumeHealth().GetHealthStatuses()) == 0 {
					t.rows = append(t.rows, []string{"health", "good", "", ""})
				}
				for _, e := range h.GetVolumeHealth().GetHealthStatuses() {
					what := e.GetStatus().String()
					if e.GetStatus() == csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE {
						what = "informational"
					}
					t.rows = append(t.rows, []string{"health", what, e.GetReason(), e.GetMessage()})
				}
				return errors.Join(g.print(cmd.OutOrStdout(), t, map[string]any{"usage": s.GetUsage(), "health": h.GetVolumeHealth()}),
					untold)
			})
		}}
}

func expandCommand(g *globals) *cobra.Command {
	var path string
	c := &cobra.Command{Use: "expand VOLUME SIZE", Short: "Enlarge a volume, and its file system where it is published",
		Args: cobra.ExactArgs(2), RunE: func(cmd *cobra.Command, args []string) error {
			n, err := parseSize(args[1])
			if err != nil {
				return err
			}
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				id, err := idOf(ctx, c, args[0])
				if err != nil {
					return err
				}
				got, err := c.Expand(ctx, id, n, path)
				if err != nil {
					return err
				}
				if path == "" {
					fmt.Fprintln(cmd.ErrOrStderr(),
						"The file system grows when the volume is published next; of one that is published now, give the "+
							"target with --path.")
				}
				return g.print(cmd.OutOrStdout(), table{[]string{"VOLUME", "SIZE"}, [][]string{{args[0], size(got)}}},
					map[string]any{"volume": args[0], "sizeBytes": got})
			})
		}}
	c.Flags().StringVar(&path, "path", "", "where it is published")
	return c
}

func snapshotCommand(g *globals) *cobra.Command {
	c := &cobra.Command{Use: "snapshot VOLUME NAME", Short: "Take a snapshot", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				id, err := idOf(ctx, c, args[0])
				if err != nil {
					return err
				}
				r, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: id, Name: args[1]})
				if err != nil {
					return err
				}
				s := r.GetSnapshot()
				return g.print(cmd.OutOrStdout(), table{[]string{"SNAPSHOT", "OF", "SIZE"},
					[][]string{{s.GetSnapshotId(), args[0], size(s.GetSizeBytes())}}}, s)
			})
		}}
	return c
}

func deleteCommand(g *globals) *cobra.Command {
	return &cobra.Command{Use: "delete ID", Short: "Destroy a volume or a snapshot", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				err := missing(ctx, c, args[0])
				switch _, _, snapshot, ok := volume.ParseID(args[0]); {
				case err != nil:
				case !ok:
					err = status.Errorf(codes.FailedPrecondition, "%s is a static volume, of no pool: there is nothing to delete", args[0])
				case snapshot:
					_, err = c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: args[0]})
				default:
					err = c.Delete(ctx, args[0])
				}
				if err != nil {
					return err
				}
				return g.done(cmd, "deleted", args[0], "")
			})
		}}
}
