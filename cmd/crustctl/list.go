package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
)

func poolCommand(g *globals) *cobra.Command {
	c := group("pool", "Look at the pools that volumes are made in")
	c.AddCommand(&cobra.Command{Use: "list", Short: "List the pools: what they hold, and what of it is promised", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
			r, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
			if err != nil {
				return err
			}
			t := table{head: []string{"POOL", "SIZE", "AVAILABLE", "USED", "PROMISED", "LEFT", "VOLUMES", "SNAPSHOTS", "STATE"}}
			for _, p := range r.GetPools() {
				state := p.GetTrouble()
				if state == "" {
					state = "good"
				}
				t.rows = append(t.rows, []string{p.GetName(), size(p.GetSize()), size(p.GetAvailable()), size(p.GetUsed()), size(p.GetPromised()), size(p.GetLeft()),
					fmt.Sprint(p.GetVolumes()), fmt.Sprint(p.GetSnapshots()), state})
			}
			return g.print(cmd.OutOrStdout(), t, r)
		})
	}})
	return c
}

func listCommand(g *globals) *cobra.Command {
	var pool string
	c := &cobra.Command{Use: "list", Short: "List volumes and snapshots, and who uses them", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
			vols, err := c.Volumes(ctx)
			if err != nil {
				return err
			}
			snaps, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
			if err != nil {
				return err
			}
			vols = slices.DeleteFunc(vols, func(v *inventory.Volume) bool { return pool != "" && v.GetPool() != pool })
			list := slices.DeleteFunc(snaps.GetEntries(), func(e *csi.ListSnapshotsResponse_Entry) bool {
				return pool != "" && !strings.HasPrefix(e.GetSnapshot().GetSnapshotId(), pool+".")
			})
			t := table{head: []string{"ID", "FOR", "SIZE", "ON DISK", "TYPE", "USED BY"}}
			for _, v := range vols {
				t.rows = append(t.rows, []string{v.GetId(), madeFor(v), sizeOrNone(v.GetSize()), sizeOrNone(v.GetAllocated()), kind(v), strings.Join(usedBy(v), ", ")})
			}
			for _, e := range list {
				s := e.GetSnapshot()
				t.rows = append(t.rows, []string{s.GetSnapshotId(), "a snapshot of " + s.GetSourceVolumeId(), size(s.GetSizeBytes()), "-", "snapshot", "-"})
			}
			return g.print(cmd.OutOrStdout(), t, map[string]any{"volumes": vols, "snapshots": list})
		})
	}}
	c.Flags().StringVar(&pool, "pool", "", "only those of this pool")
	return c
}

// madeFor is the claim that a volume was made for, or its name.
func madeFor(v *inventory.Volume) string {
	if v.GetClaim() != "" {
		return v.GetClaim()
	}
	return orNone(v.GetName())
}

func kind(v *inventory.Volume) string {
	what := v.GetFsType()
	if what == "" {
		what = "block"
	}
	switch {
	case v.GetPool() == "":
		return what + ", static"
	case v.GetThick():
		return what + ", thick"
	}
	return what
}

// usedBy names the pods that have a volume; a target where the pod is not known.
func usedBy(v *inventory.Volume) []string {
	var all []string
	for _, u := range v.GetUses() {
		who := podOf(u)
		switch {
		case u.GetDeferred() && u.GetReadOnly():
			who += " (in its sandbox, read-only)"
		case u.GetDeferred():
			who += " (in its sandbox)"
		case u.GetReadOnly():
			who += " (read-only)"
		}
		all = append(all, who)
	}
	if len(all) == 0 && v.GetStaged() {
		return []string{"nobody; staged"}
	}
	if len(all) == 0 {
		return []string{"-"}
	}
	return all
}

// podUID finds the pod in a target path of the kubelet's.
var podUID = regexp.MustCompile(`/pods/([0-9a-f-]{36})/`)

func podOf(u *inventory.Use) string {
	if u.GetPod() != "" {
		return u.GetPod()
	}
	if m := podUID.FindStringSubmatch(u.GetTarget()); m != nil {
		return "pod " + m[1]
	}
	return u.GetTarget()
}

func sizeOrNone(n int64) string {
	if n == 0 {
		return "-"
	}
	return size(n)
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// podsByTarget asks the driver of this node, if there is one: a CRUST server knows
// sandboxes, and no pods.
func (g *globals) podsByTarget(ctx context.Context) map[string]string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return nil
	}
	defer c.Close()
	pods := map[string]string{}
	volumes, _ := c.Volumes(ctx) // without it host targets are shown
	for _, v := range volumes {
		for _, u := range v.GetUses() {
			pods[u.GetTarget()] = u.GetPod()
		}
	}
	return pods
}
