//go:build man

package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"

	"github.com/crust-csi/crust-csi/internal/version"
)

// With the build tag man, this program writes its manual pages into a directory and does nothing
// else. Released binaries therefore lack the code that writes them.
func init() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "built with the tag man: give the directory for the manual pages")
		os.Exit(1)
	}
	c := root()
	c.DisableAutoGenTag = true
	header := &doc.GenManHeader{Section: "8", Source: "Crust CSI " + version.String(), Manual: "Crust CSI"}
	if err := doc.GenManTree(c, header, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "crustctl:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
