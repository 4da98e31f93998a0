package testnode

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Root is the project's directory.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("the test does not run in the project's directory")
	return ""
}

// Releases returns the versions in test/skew/releases, oldest first.
func Releases(t testing.TB) []string {
	t.Helper()
	f, err := os.Open(filepath.Join(Root(t), "test/skew/releases"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var versions []string
	for s := bufio.NewScanner(f); s.Scan(); {
		if version, _, ok := strings.Cut(s.Text(), " "); ok && strings.HasPrefix(version, "v") {
			versions = append(versions, version)
		}
	}
	if len(versions) == 0 {
		t.Fatal("test/skew/releases names no release")
	}
	return versions
}

var releases sync.Mutex

// ReleaseDir is a directory with the programs of a release, which scripts/releases.sh builds.
func ReleaseDir(t testing.TB, version string) string {
	t.Helper()
	releases.Lock()
	defer releases.Unlock()
	root := Root(t)
	if out, err := exec.Command(filepath.Join(root, "scripts/releases.sh")).CombinedOutput(); err != nil {
		t.Fatalf("the programs of the releases: %v\n%s", err, out)
	}
	return filepath.Join(root, ".cache/skew", version)
}
