package skew

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// clone is a repository with scripts/releases.sh and these other files, and one commit.
type clone struct {
	t   *testing.T
	dir string
}

func newClone(t *testing.T, files map[string]string) clone {
	t.Helper()
	c := clone{t, t.TempDir()}
	script, err := os.ReadFile(filepath.Join(testnode.Root(t), "scripts/releases.sh"))
	ok(t, err)
	c.write("scripts/releases.sh", string(script))
	for name, text := range files {
		c.write(name, text)
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"},
		{"-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-qm", "x"}} {
		if out, err := c.run("git", args...); err != nil {
			t.Fatal(out)
		}
	}
	return c
}

func (c clone) write(name, text string) {
	c.t.Helper()
	ok(c.t, os.MkdirAll(filepath.Dir(filepath.Join(c.dir, name)), 0o755))
	ok(c.t, os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o755))
}

func (c clone) run(name string, args ...string) (string, error) {
	p := exec.Command(name, args...)
	p.Dir = c.dir
	out, err := p.CombinedOutput()
	return string(out), err
}

// In a clone without the release's commit the tests fail, and say how to get it.
func TestACloneWithoutTheReleasesCommitIsToldHowToGetIt(t *testing.T) {
	const commit = "0123456789012345678901234567890123456789"
	c := newClone(t, map[string]string{"test/skew/releases": "# a comment\nv9.9.9 " + commit + "\n"})
	out, err := c.run("scripts/releases.sh")
	if err == nil {
		t.Fatalf("it ended well: %s", out)
	}
	for _, word := range []string{commit, "v9.9.9", "git fetch --unshallow", ".cache/skew/v9.9.9"} {
		if !strings.Contains(out, word) {
			t.Errorf("it does not say %q: %s", word, out)
		}
	}
	if _, err := os.Stat(c.dir + "/.cache/skew/v9.9.9"); !os.IsNotExist(err) {
		t.Errorf("something of it was made: %v", err)
	}
}

// A cache that was filled when fewer programs were tested gets the others. A complete one stays.
func TestAReleaseWithoutAProgramIsBuiltAgain(t *testing.T) {
	c := newClone(t, map[string]string{
		"a.go":                    `package a; var a = record.Type{Kind: "a"}`,
		"deploy/image/compile.sh": "#!/bin/bash\nto=$2\nshift 2\nfor p in \"$@\"; do touch \"$to/${p##*/}\"; done\n",
	})
	commit, err := c.run("git", "rev-parse", "HEAD")
	ok(t, err)
	c.write("test/skew/releases", "v9.9.9 "+commit)
	for i, before := range []func(){
		func() {},
		func() { ok(t, os.Remove(c.dir+"/.cache/skew/v9.9.9/csi-steward")) },
		func() {},
	} {
		before()
		out, err := c.run("scripts/releases.sh")
		if err != nil || strings.Contains(out, "building") != (i < 2) {
			t.Fatalf("run %d: %v: %s", i+1, err, out)
		}
		for _, program := range []string{"csi-node", "csi-steward", "crustctl", "crustd", "crust-agent", "crust-guest"} {
			if _, err := os.Stat(filepath.Join(c.dir, ".cache/skew/v9.9.9", program)); err != nil {
				t.Errorf("run %d: %v", i+1, err)
			}
		}
	}
}
