// Package sanity runs the whole suite of csi-test against the real csi-node,
// on real loop devices and mounts.
package sanity

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

// TestSanity runs once: Ginkgo takes one suite a process. CRUST_SANITY_ACCESS
// chooses the access type; `make sanity` runs both.
func TestSanity(t *testing.T) {
	n := testnode.New(t, "")
	c := sanity.NewTestConfig()
	c.Address = n.Endpoint()
	c.TargetPath = filepath.Join(n.KubeletDir(), "pods")
	c.StagingPath = filepath.Join(n.KubeletDir(), "staging")
	c.TestVolumeSize = 512 << 20
	c.TestVolumeExpandSize = 768 << 20
	if access := os.Getenv("CRUST_SANITY_ACCESS"); access != "" {
		c.TestVolumeAccessType = access
	}
	sanity.Test(t, c)
}
