package skew

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// In a clone without the release's commit the tests fail, and say how to get it.
func TestACloneWithoutTheReleasesCommitIsToldHowToGetIt(t *testing.T) {
	dir := t.TempDir()
	script, err := os.ReadFile(filepath.Join(testnode.Root(t), "scripts/releases.sh"))
	ok(t, err)
	for _, sub := range []string{"scripts", "test/skew"} {
		ok(t, os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
	const commit = "0123456789012345678901234567890123456789"
	ok(t, os.WriteFile(dir+"/scripts/releases.sh", script, 0o755))
	ok(t, os.WriteFile(dir+"/test/skew/releases", []byte("# a comment\nv9.9.9 "+commit+"\n"), 0o644))
	run := func(name string, args ...string) (string, error) {
		c := exec.Command(name, args...)
		c.Dir = dir
		out, err := c.CombinedOutput()
		return string(out), err
	}
	out, err := run("git", "init", "-q")
	if err != nil {
		t.Fatal(out)
	}
	out, err = run("scripts/releases.sh")
	if err == nil {
		t.Fatalf("it ended well: %s", out)
	}
	for _, word := range []string{commit, "v9.9.9", "git fetch --unshallow", ".cache/skew/v9.9.9"} {
		if !strings.Contains(out, word) {
			t.Errorf("it does not say %q: %s", word, out)
		}
	}
	if _, err := os.Stat(dir + "/.cache/skew/v9.9.9"); !os.IsNotExist(err) {
		t.Errorf("something of it was made: %v", err)
	}
}
