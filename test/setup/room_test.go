// Package setup tests the project's scripts on a new machine.
package setup

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A full disk for temporary files gives one clear message before the build, not an error of the
// linker.
func TestFleet_AFullDiskIsASentence(t *testing.T) {
	full := t.TempDir()
	if err := unix.Mount("none", full, "tmpfs", 0, "size=2M"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(full, 0); err != nil {
			t.Error(err)
		}
	})
	for _, target := range []string{"demo", "test"} {
		c := exec.Command("make", "-C", "../..", target)
		c.Env = append(os.Environ(), "TMPDIR="+full)
		out, err := c.CombinedOutput()
		want := "room: " + full + " has 2 MiB free, and "
		if err == nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), "set TMPDIR") ||
			strings.Contains(string(out), "go build") {
			t.Errorf("make %s: %v, without %q:\n%s", target, err, want, out)
		}
	}
	if entries, err := os.ReadDir(full); err != nil || len(entries) > 0 {
		t.Errorf("left there: %v %v", entries, err)
	}
}
