package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/conformance"
)

func conformanceCommand(g *globals) *cobra.Command {
	c := conformance.Config{}
	cmd := &cobra.Command{Use: "conformance SANDBOX", Short: "Check a CRUST server: publish volumes on new loop devices to a sandbox that runs, and " +
		"take them out again", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Sandbox, c.KubeletDir = args[0], g.kubeletDir
			if c.Scratch == "" {
				c.Scratch = os.TempDir()
			}
			return g.withCrust(cmd, func(ctx context.Context, client *crust.Client) error {
				c.Client = client
				results, err := conformance.Run(ctx, c)
				t, failed := table{head: []string{"CHECK", "OUTCOME", "DETAIL"}}, 0
				for _, r := range results {
					t.rows = append(t.rows, []string{r.Check, string(r.Outcome), r.Detail})
					if r.Outcome == conformance.Failed {
						failed++
					}
				}
				err = errors.Join(err, g.print(cmd.OutOrStdout(), t, results))
				if failed > 0 {
					err = errors.Join(fmt.Errorf("%d of %d checks failed", failed, len(results)), err)
				}
				return err
			})
		}}
	cmd.Flags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket")
	cmd.Flags().StringVar(&c.Other, "other", "", "a second sandbox that runs")
	cmd.Flags().StringVar(&c.Driver, "driver", "csi.crust.dev", "the CSI driver to which the server allows loop devices")
	cmd.Flags().StringVar(&c.Scratch, "dir", "", "directory for sparse files, 640 MiB each at most (default: the directory for temporary files)")
	return cmd
}
