//go:build man

package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/crust-csi/crust-csi/internal/version"
)

// With the build tag man, this program writes its manual page into a directory and does nothing
// else.
func init() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "built with the tag man: give the directory for the manual page")
		os.Exit(1)
	}
	c := &cobra.Command{
		Use: "csi-node", Short: "CSI server of a node: volumes in pools of loop files, block devices and NFS shares",
		DisableAutoGenTag: true,
		Long: "csi-node serves CSI (identity, controller for the volumes of this node, node) on a unix socket.\n" +
			"It needs root, and at least one --pool or --allow-device, as flags or in its --config.\n" +
			"SIGHUP has it read that file again; it does so by itself when the file changes.\n" +
			"SIGTERM ends it: calls in flight are finished first, and volumes stay mounted.\n" +
			"crustctl(8) looks after it.",
		Example: "  csi-node --pool default=loop:/var/lib/crust-csi/pool",
		Run:     func(*cobra.Command, []string) {},
	}
	c.Flags().SortFlags = false
	c.Flags().AddGoFlagSet((&options{}).flags())
	header := &doc.GenManHeader{Section: "8", Source: "Crust CSI " + version.String(), Manual: "Crust CSI"}
	if err := doc.GenManTree(c, header, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "csi-node:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
