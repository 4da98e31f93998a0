package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func listCommand(g *globals) *cobra.Command {
	var pool string
	c := &cobra.Command{Use: "list", Short: "List volumes and snapshots, and who uses them", Args: cobra.NoArgs}
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
			if err := whatIsMissing(ctx, c, pool, cmd.ErrOrStderr()); err != nil {
				return err
			}
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
				t.rows = append(t.rows, []string{v.GetId(), madeFor(v), sizeOrNone(v.GetSize()), sizeOrNone(v.GetAllocated()), kind(v),
					usedBy(v)})
			}
			for _, e := range list {
				s := e.GetSnapshot()
				of := "a snapshot of " + s.GetSourceVolumeId()
				t.rows = append(t.rows, []string{s.GetSnapshotId(), of, size(s.GetSizeBytes()), "-", "snapshot", "-"})
			}
			return g.print(cmd.OutOrStdout(), t, map[string]any{"volumes": vols, "snapshots": list})
		})
	}
	c.Flags().StringVar(&pool, "pool", "", "list this pool only")
	return c
}

// whatIsMissing tells which pools are away: the list has nothing of them. A pool that the node does not have is an error.
func whatIsMissing(ctx context.Context, c *csiclient.Client, pool string, to io.Writer) error {
	r, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
	switch {
	case status.Code(err) == codes.Unimplemented:
		return nil
	case err != nil && pool == "": // the list may be all there is
		fmt.Fprintf(to, "crustctl: which pools are away: %s\n", explain(err))
		return nil
	case err != nil:
		return err
	}
	found := pool == ""
	for _, p := range r.GetPools() {
		if pool != "" && p.GetName() != pool {
			continue
		}
		found = true
		if p.GetTrouble() != "" {
			fmt.Fprintf(to, "crustctl: pool %s: %s\n", p.GetName(), p.GetTrouble())
		}
	}
	for _, p := range r.GetFormer() {
		if pool == "" || p.GetName() == pool {
			found = true
			fmt.Fprintf(to, "crustctl: %s\n", formerPoolMeans(p))
		}
	}
	if !found {
		return status.Errorf(codes.NotFound, "this node has no pool %s (crustctl pool list)", pool)
	}
	return nil
}

// madeFor returns the claim that a volume was made for, or its name.
func madeFor(v *inventory.Volume) string { return cmp.Or(v.GetClaim(), v.GetName(), "-") }

// poolGone returns the pool of a volume if the driver does not have it any more.
func poolGone(v *inventory.Volume) string {
	if v.GetPool() != "" {
		return ""
	}
	pool, _, _, _ := volume.ParseID(v.GetId())
	return pool
}

func kind(v *inventory.Volume) string {
	what := v.GetFsType()
	if what == "" {
		what = "block"
	}
	switch {
	case poolGone(v) != "":
		return what + ", of pool " + poolGone(v) + ", which is not configured"
	case v.GetPool() == "":
		return what + ", static"
	case v.GetThick():
		return what + ", thick"
	}
	return what
}

// usedBy names the pods that use a volume.
func usedBy(v *inventory.Volume) string {
	var all []string
	for _, u := range v.GetUses() {
		all = append(all, user(u))
	}
	switch {
	case len(all) > 0:
		return strings.Join(all, ", ")
	case v.GetStaged():
		return "staged, not published"
	}
	return "-"
}

// user returns the pod of a use, and how it uses the volume.
func user(u *inventory.Use) string {
	how := ""
	switch {
	case u.GetDeferred() && u.GetReadOnly():
		how = " (in its sandbox, read-only)"
	case u.GetDeferred():
		how = " (in its sandbox)"
	case u.GetReadOnly():
		how = " (read-only)"
	}
	return podOf(u) + how
}

// podUID matches the pod's uid in a kubelet target path.
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

// podsByTarget asks this node's driver for pods, because a CRUST server does not know them. Without
// a driver it returns nothing.
func (g *globals) podsByTarget(ctx context.Context) map[string]string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return nil
	}
	defer c.Close()
	pods := map[string]string{}
	volumes, _ := c.Volumes(ctx) // without it, host targets are shown
	for _, v := range volumes {
		for _, u := range v.GetUses() {
			pods[u.GetTarget()] = u.GetPod()
		}
	}
	return pods
}
