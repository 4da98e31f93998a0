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
				return g.print(cmd.OutOrStdout(), poolTable(r.GetPools()), r)
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
		row = append(row, fmt.Sprint(p.GetVolumes()), fmt.Sprint(p.GetSnapshots()), cmp.Or(p.GetTrouble(), "good"))
		t.rows = append(t.rows, row)
	}
	return t
}
