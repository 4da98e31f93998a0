// Command agnhost stands in for the image of that name in the storage suite: two of its commands,
// from Kubernetes' own packages.
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
