//go:build kubernetes

package kubernetes_test

import (
	"strings"
	"testing"
	"time"
)

// B3: csi-node's container sees when a disk is mounted or unmounted at the pool's directory after
// its start. Another disk there is no pool. The pool is back with its own directory, without a
// restart.
func TestB03_ADiskThatIsMountedLater(t *testing.T) {
	s := use(t)
	const node, pool, image = "node-2", "/var/lib/crust-csi/pool", "/var/lib/crust-csi/other-disk.img"
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"}, away(node))
	s.run("p", "echo kept >/data/f; sync")
	s.delete("p")
	driver := s.daemon("csi-node", node)
	restarts := func() string {
		return (&space{t: t, ns: system}).get(driver, ".status.containerStatuses[*].restartCount")
	}
	before := restarts()
	state := func(want string) {
		t.Helper()
		s.until(time.Minute, "the pool is "+want, func() (string, bool) {
			out, err := s.try("exec", "-n", system, driver, "-c", "csi-node", "--", "crustctl", "pool", "list")
			if err != nil {
				out += err.Error()
			}
			return out, strings.Contains(out, want)
		})
	}
	state("good")
	t.Cleanup(func() { onThe(t, node, "! mountpoint -q "+pool+" || umount "+pool+"; rm -f "+image) })
	onThe(t, node, "truncate -s 64M "+image+" && mkfs.ext4 -q "+image+" && mount -o loop "+image+" "+pool)
	state("no pool, as if its disk were not mounted")
	onThe(t, node, "umount "+pool)
	state("good")
	s.pod("again", []string{"data:/data"}, away(node))
	if got := s.run("again", "cat /data/f"); got != "kept" {
		t.Errorf("it reads %q", got)
	}
	if now := restarts(); now != before || s.daemon("csi-node", node) != driver {
		t.Errorf("csi-node was restarted: %s, %s before", now, before)
	}
}
