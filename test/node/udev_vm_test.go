//go:build vm

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A01: with deploy/udev's rule, udevd reads nothing of what a guest or a pod writes to a volume. Without it, udevd does.
func TestA01_UdevdReadsNoVolume(t *testing.T) {
	const rules = "/run/udev/rules.d"
	run(t, "/lib/systemd/systemd-udevd", "--daemon")
	t.Cleanup(func() { run(t, "udevadm", "control", "--exit") })
	rule, err := os.ReadFile("../../deploy/udev/59-crust.rules")
	ok(t, err)
	for name, with := range map[string]bool{"without the rule": false, "with the rule": true} {
		t.Run(name, func(t *testing.T) {
			ok(t, os.MkdirAll(rules, 0o755))
			if with {
				ok(t, os.WriteFile(rules+"/59-crust.rules", rule, 0o644))
				defer func() { ok(t, os.Remove(rules+"/59-crust.rules")) }()
			}
			run(t, "udevadm", "control", "--reload")
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{Block: true})
			run(t, "mkfs.ext4", "-q", "-F", "-U", "5ca1ab1e-0000-4000-8000-000000000000", target)
			// udevd looks at the loop device when that is bound again: mkfs wrote to another device, which is mapped on it.
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			run(t, "udevadm", "settle")
			var read []string
			for _, about := range globbed(t, "/run/udev/data/b*") {
				b, err := os.ReadFile(about)
				if err == nil && strings.Contains(string(b), "5ca1ab1e") {
					read = append(read, about)
				}
			}
			links := globbed(t, "/dev/disk/by-uuid/5ca1ab1e*")
			if found := len(read)+len(links) > 0; found == with {
				t.Errorf("udevd has read %q, and made %q", read, links)
			}
			down(t, n, v.ID, target)
		})
	}
}

func globbed(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	ok(t, err)
	return found
}
