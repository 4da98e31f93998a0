package skew

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestCrustctlOfAnotherVersion: an operator's crustctl, which is not upgraded with the nodes, shows
// the data of another version's csi-node, or says what that version cannot provide.
func TestCrustctlOfAnotherVersion(t *testing.T) {
	forEachRelease(t, func(t *testing.T, release string) {
		n := testnode.NewStopped(t, "")
		n.Bin = program(t, release, "csi-node")
		n.Begin()
		p := &pod{t: t, n: n, name: "used", v: csiclient.Volume{FSType: "ext4", Group: "2000"}, size: size}
		made, err := n.Client.Create(ctxOf(t), p.name, size, p.v, nil, nil)
		ok(t, err)
		p.v.ID, p.v.Context = made.GetVolumeId(), made.GetVolumeContext()
		ok(t, n.Client.Stage(ctxOf(t), p.v))
		p.begin()
		deferred := deferOne(t, n, "deferred")
		for node, ctl := range map[string]string{release: today, today: release} {
			becomes(t, n, node)
			says := func(code int, args []string, want ...string) {
				t.Helper()
				var out bytes.Buffer
				c := exec.Command(program(t, ctl, "crustctl"),
					append([]string{"--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir()}, args...)...)
				c.Stdout, c.Stderr = &out, &out
				err := c.Run()
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) || c.ProcessState.ExitCode() != code {
					t.Errorf("crustctl %s of %s, csi-node of %s: %v, want exit code %d\n%s", strings.Join(args, " "), ctl, node, err,
						code, out.String())
				}
				for _, w := range want {
					if !strings.Contains(out.String(), w) {
						t.Errorf("crustctl %s of %s, csi-node of %s: without %q:\n%s", strings.Join(args, " "), ctl, node, w, out.String())
					}
				}
			}
			none := []string{"--crust", "unix://" + filepath.Join(n.Dir, "none.sock")}
			says(0, []string{"volume", "list"}, "used", "deferred", p.v.ID)
			says(0, []string{"volume", "show", "used"}, p.v.ID, p.target(), "2000")
			says(0, []string{"volume", "show", "deferred"}, deferred.v.ID, n.Target("deferred"))
			says(0, []string{"volume", "show", p.target()}, "2000")
			says(0, []string{"volume", "stats", p.v.ID, p.target()}, "bytes")
			says(0, []string{"pool", "list"}, "pool")
			says(0, []string{"pool", "check"})
			says(0, append([]string{"top", "--once"}, none...), "used", "deferred", "2000")
			says(0, []string{"history", "--state-dir", filepath.Join(n.Dir, "state")}, "used")
			says(1, append([]string{"node", "drain-check"}, none...), "deferred")
			bundle := filepath.Join(t.TempDir(), "bundle.tar.gz")
			says(0, append([]string{"support-bundle", "-o", bundle}, none...))
			if st, err := os.Stat(bundle); err != nil || st.Size() == 0 {
				t.Errorf("the bundle of crustctl of %s with csi-node of %s: %v", ctl, node, err)
			}
			// What an operator does by hand.
			says(0, []string{"volume", "create", "by-hand-" + node, "--size", "64Mi"})
			says(0, []string{"volume", "list"}, "by-hand-"+node)
			for _, id := range idsOf(t, n, "by-hand-"+node) {
				says(0, []string{"volume", "delete", id})
			}
		}
		p.use()
		deferred.goesOn()
		deferred.remove()
		p.remove()
	})
}

// idsOf returns the volumes of a name.
func idsOf(t *testing.T, n *testnode.Node, name string) []string {
	t.Helper()
	r, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	var ids []string
	for _, e := range r.GetEntries() {
		if e.GetVolume().GetVolumeContext()["csi.crust.dev/name"] == name {
			ids = append(ids, e.GetVolume().GetVolumeId())
		}
	}
	if len(ids) == 0 {
		t.Errorf("no volume %s: %v", name, r)
	}
	return ids
}
