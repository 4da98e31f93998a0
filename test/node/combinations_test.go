package node

import (
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// TestCombinations covers what pods can request at once: in each cell, a volume whose files were
// given to group 3000 is published twice. Group 0 means that none is requested.
func TestCombinations(t *testing.T) {
	t.Parallel()
	type publish struct {
		group    uint32
		readOnly bool
	}
	const rw, ro = false, true
	cells := []struct {
		strategy       string
		first, second  publish
		shownA, shownB uint32 // while both are published
	}{
		// chown: the disk has one group, that of the last writable publish with one.
		{"chown", publish{0, rw}, publish{0, rw}, 3000, 3000},
		{"chown", publish{3000, rw}, publish{3000, ro}, 3000, 3000},
		{"chown", publish{4000, rw}, publish{0, rw}, 4000, 4000},
		{"chown", publish{4000, rw}, publish{5000, rw}, 5000, 5000},
		{"chown", publish{4000, ro}, publish{0, rw}, 3000, 3000},
		{"chown", publish{4000, ro}, publish{5000, rw}, 5000, 5000},
		{"chown", publish{4000, rw}, publish{5000, ro}, 4000, 4000},
		{"chown", publish{4000, ro}, publish{5000, ro}, 3000, 3000},
		// idmap: each publish shows its own.
		{"idmap", publish{0, rw}, publish{0, rw}, 3000, 3000},
		{"idmap", publish{3000, rw}, publish{3000, ro}, 3000, 3000},
		{"idmap", publish{4000, rw}, publish{0, rw}, 4000, 3000},
		{"idmap", publish{4000, rw}, publish{5000, rw}, 4000, 5000},
		{"idmap", publish{4000, ro}, publish{0, rw}, 4000, 3000},
		{"idmap", publish{4000, ro}, publish{5000, rw}, 4000, 5000},
		{"idmap", publish{4000, rw}, publish{5000, ro}, 4000, 5000},
		{"idmap", publish{4000, ro}, publish{5000, ro}, 4000, 5000},
	}
	labels := []string{""}
	if mounter.SELinux().Answer == mounter.Yes {
		labels = append(labels, "system_u:object_r:svirt_image_t:s0:c1,c2")
	}
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			n := testnode.New(t, "")
			v := create(t, n, "v", csiclient.Volume{FSType: fstype, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
			ok(t, n.Client.Stage(ctxOf(t), v))
			a, b := n.Target("a"), n.Target("b")
			ok(t, n.Client.Publish(ctxOf(t), v, a, false))
			fillTree(t, a, 3)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, a))
			for _, label := range labels {
				for _, c := range cells {
					name := fmt.Sprintf("%s %v %v label=%v", c.strategy, c.first, c.second, label != "")
					ok(t, n.Client.Publish(ctxOf(t), with(v, "3000"), a, false))
					ok(t, n.Client.Unpublish(ctxOf(t), v.ID, a))
					as := func(p publish) csiclient.Volume {
						group := ""
						if p.group != 0 {
							group = fmt.Sprint(p.group)
						}
						w := with(v, group, "fsGroupStrategy", c.strategy)
						if label != "" {
							w.MountFlags = []string{"context=" + label}
						}
						return w
					}
					ok(t, n.Client.Publish(ctxOf(t), as(c.first), a, c.first.readOnly))
					ok(t, n.Client.Publish(ctxOf(t), as(c.second), b, c.second.readOnly))
					for _, look := range []struct {
						target string
						p      publish
						shown  uint32
					}{{a, c.first, c.shownA}, {b, c.second, c.shownB}} {
						for _, path := range []string{"", "/d0", "/d0/f0"} {
							if _, gid := owner(t, look.target+path); gid != look.shown {
								t.Errorf("%s: %s%s has group %d, want %d", name, look.target, path, gid, look.shown)
							}
						}
						err := asPod(t, look.shown, in(look.target, "echo x >> d0/f0"))
						if (err == nil) == look.p.readOnly {
							t.Errorf("%s: a write as group %d: %v", name, look.shown, err)
						}
						if err := asPod(t, 6000, in(look.target, "echo x >> d0/f0")); err == nil {
							t.Errorf("%s: another group wrote", name)
						}
						if label != "" {
							wantLabel(t, name, look.target+"/d0/f0", label)
						}
					}
					ok(t, n.Client.Unpublish(ctxOf(t), v.ID, a))
					ok(t, n.Client.Unpublish(ctxOf(t), v.ID, b))
				}
			}
			down(t, n, v.ID)
		})
	}
}

// label returns the SELinux label of a file.
func label(t testing.TB, path string) string {
	t.Helper()
	return strings.TrimRight(strings.TrimSpace(run(t, "getfattr",
		"-h", "--absolute-names", "--only-values", "-n", "security.selinux", path)), "\x00")
}

func wantLabel(t *testing.T, name, path, want string) {
	t.Helper()
	if got := label(t, path); got != want {
		t.Errorf("%s: %s has the label %s", name, path, got)
	}
}
