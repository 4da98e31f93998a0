// Package skew tests programs of releases together with today's: each reads what the other has
// written and handles what the other has mounted, in each pair that an upgrade or a downgrade
// creates.
package skew

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

const size = testcrust.Size

// Helpers of every test.
var (
	ok         = testcrust.OK
	refused    = testcrust.Refused
	ctxOf      = testcrust.Context
	eventually = testcrust.Eventually
)

// today is the version name of this tree's programs.
const today = "today"

// program returns one of cmd, of a release or today's.
func program(t testing.TB, version, name string) string {
	t.Helper()
	if version == today {
		return testnode.BuildCommand(t, name, "")
	}
	return filepath.Join(testnode.ReleaseDir(t, version), name)
}

// becomes replaces csi-node, and checks the version of the new one.
func becomes(t testing.TB, n *testnode.Node, version string) {
	t.Helper()
	n.Become(program(t, version, "csi-node"))
	isVersion(t, n, version)
}

func isVersion(t testing.TB, n *testnode.Node, version string) {
	t.Helper()
	r, err := n.Client.GetPluginInfo(ctxOf(t), &csi.GetPluginInfoRequest{})
	ok(t, err)
	if got := r.GetVendorVersion(); (version == today) != strings.HasSuffix(got, "-dev") || version != today && "v"+got != version {
		t.Fatalf("a csi-node of %s says that it is %s", version, got)
	}
}

// forEachRelease runs a test beside each release.
func forEachRelease(t *testing.T, f func(t *testing.T, release string)) {
	for _, release := range testnode.Releases(t) {
		t.Run(release, func(t *testing.T) { f(t, release) })
	}
}
