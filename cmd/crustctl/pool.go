package main

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
)

func poolCommand(g *globals) *cobra.Command {
	c := group("pool", "Show and check the pools")
	c.AddCommand(&cobra.Command{Use: "list", Short: "List the pools with their used and promised space", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
				r, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
				if err != nil {
					return err
				}
				t := poolTable(r.GetPools())
				for _, p := range r.GetFormer() {
					state := "not configured any more: " + p.GetContent()
					t.rows = append(t.rows, []string{p.GetName(), "-", "-", "-", "-", "-", "-", "-", state})
				}
				return g.print(cmd.OutOrStdout(), t, r)
			})
		}}, poolCheck(g))
	return c
}

func poolTable(pools []*inventory.Pool) table {
	t := table{head: []string{"POOL", "SIZE", "AVAILABLE", "USED", "PROMISED", "LEFT", "VOLUMES", "SNAPSHOTS", "STATE"}}
	for _, p := range pools {
		row := []string{p.GetName()}
		for _, n := range []int64{p.GetSize(), p.GetAvailable(), p.GetUsed(), p.GetPromised(), p.GetLeft()} {
			row = append(row, size(n))
		}
		row = append(row, fmt.Sprint(p.GetVolumes()), fmt.Sprint(p.GetSnapshots()), cmp.Or(p.GetTrouble(), full(p), "good"))
		t.rows = append(t.rows, row)
	}
	return t
}

// full says that a pool has no room for what pods write, although more may be promised to volumes than it has.
func full(p *inventory.Pool) string {
	if p.GetSize() > 0 && p.GetAvailable() == 0 {
		return "full: writes of pods may fail"
	}
	return ""
}

// notConfigured is the kind of what is found about a pool that csi-node is not configured with any more.
const notConfigured = "pool-not-configured"

func formerPoolMeans(p *inventory.FormerPool) string {
	return "csi-node is not configured with pool " + p.GetName() + " any more, and the pool is not known to be empty: " + p.GetContent()
}

func formerPoolDo(p *inventory.FormerPool) string {
	return "start csi-node with that pool again, and see what it has (crustctl volume list). If its data is needed no more, or its disk is " +
		"gone for good, delete " + p.GetRecord() + " on the node: csi-node then forgets the pool"
}
