// Package sanity runs the whole csi-test suite against the real csi-node, on real loop devices and
// mounts.
package sanity

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

// TestSanity runs once, because Ginkgo runs one suite per process. CRUST_SANITY_ACCESS chooses the
// access type; `make sanity` runs both.
func TestSanity(t *testing.T) {
	// C01: csi-test fails on a capability whose number it does not know.
	n := testnode.New(t, "", "--runtime-assisted-mounts=false")
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

// The skipped specs must be those that docs/conformance.md lists with a reason.
var _ = ginkgo.ReportAfterSuite("skipped specs are the documented ones", func(r ginkgo.Report) {
	doc, err := os.ReadFile("../docs/conformance.md")
	if err != nil {
		ginkgo.Fail(err.Error())
	}
	rows := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| ([0-9]+) \\|").FindAllStringSubmatch(string(doc), -1)
	got := map[string]int{}
	for _, s := range r.SpecReports {
		if s.State != types.SpecStateSkipped && s.State != types.SpecStatePending {
			continue
		}
		i := slices.IndexFunc(rows, func(row []string) bool { return strings.HasPrefix(s.FullText(), row[1]) })
		if i < 0 {
			ginkgo.Fail("skipped, and not in docs/conformance.md: " + s.FullText() + ": " + s.Failure.Message)
		}
		got[rows[i][1]]++
	}
	for _, row := range rows {
		if want, err := strconv.Atoi(row[2]); err != nil || got[row[1]] != want {
			ginkgo.Fail(fmt.Sprintf("docs/conformance.md says %s specs %q are skipped, and %d were", row[2], row[1], got[row[1]]))
		}
	}
})
