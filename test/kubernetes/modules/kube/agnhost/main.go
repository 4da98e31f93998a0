// Command agnhost is what the storage suite asks of the image of that name: two of its
// commands, from Kubernetes' own packages.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"k8s.io/kubernetes/test/images/agnhost/mounttest"
	"k8s.io/kubernetes/test/images/agnhost/pause"
)

func main() {
	root := &cobra.Command{Use: "agnhost"}
	root.AddCommand(mounttest.CmdMounttest, pause.CmdPause)
	if root.Execute() != nil {
		os.Exit(1)
	}
}
