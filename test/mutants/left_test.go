package main

import (
	"os/exec"
	"strings"
	"testing"
)

// A test that is cut off leaves devices over others, as readers of raw block volumes have. It had mounts of its own, which have ended with
// it, so the kernel shows the device below as /loop0.
func TestDevicesOfATestWithItsOwnMountsAreFound(t *testing.T) {
	tr := &tree{tmp: t.TempDir()}
	const make = `truncate -s 1M "$0/disk" && below=$(losetup -f --show "$0/disk") && losetup -r -f --show "$below"`
	out, err := exec.Command("unshare", "--mount", "sh", "-c", make, tr.tmp).Output()
	above := strings.TrimSpace(string(out))
	if err != nil || above == "" {
		t.Fatal(above, err)
	}
	defer func() { _ = exec.Command("losetup", "-d", above).Run() }()
	found := tr.loops()
	if len(found) != 2 || found[1] != above {
		t.Errorf("found %v, and %s is left over another", found, above)
	}
	for _, l := range found {
		if l != above {
			defer func() { _ = exec.Command("losetup", "-d", l).Run() }()
		}
	}
}
