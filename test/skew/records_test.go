package skew

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const wayOut = `CONTRIBUTING.md, "Skew", tells how one is made`

var kindPattern = regexp.MustCompile(`(\w+)\s*= record\.Type\{Kind: "([^"]+)"`)

// Each kind of record has fixtures, and a test beside its code that reads them.
func TestEachKindOfRecordHasFixturesThatAreRead(t *testing.T) {
	root, kinds := testnode.Root(t), 0
	for _, top := range []string{"cmd", "internal", "pkg"} {
		ok(t, filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			found := kindPattern.FindAllStringSubmatch(string(b), -1)
			if strings.Count(string(b), "record.Type{") != len(found) {
				t.Errorf("%s has a record.Type that is not written NAME = record.Type{Kind: \"KIND\", so this test cannot see it", path)
			}
			for _, kind := range found {
				kinds++
				if len(recordtest.Files(t, kind[2])) == 0 {
					t.Errorf("%s: records of kind %q have no fixture in test/skew/testdata: %s", path, kind[2], wayOut)
				}
				if read := regexp.MustCompile(`recordtest\.Read\[\w+\]\(t, ` + kind[1] + `\)`); !read.MatchString(testsIn(t,
					filepath.Dir(path))) {
					t.Errorf("%s: no test beside it reads the fixtures of %s (recordtest.Read)", path, kind[1])
				}
			}
			return nil
		}))
	}
	if kinds < 14 {
		t.Errorf("only %d kinds of records were found", kinds)
	}
}

// testsIn returns the text of a package's tests.
func testsIn(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	ok(t, err)
	var all strings.Builder
	for _, file := range files {
		b, err := os.ReadFile(file)
		ok(t, err)
		all.Write(b)
	}
	return all.String()
}

// Each release has fixtures of every kind that it writes.
func TestEachReleaseHasFixturesOfItsKinds(t *testing.T) {
	forEachRelease(t, func(t *testing.T, release string) {
		kinds, err := os.ReadFile(filepath.Join(testnode.ReleaseDir(t, release), "kinds"))
		ok(t, err)
		for _, kind := range append(strings.Fields(string(kinds)), "audit", "ownership", "microvm") {
			if files, err := filepath.Glob(filepath.Join("testdata", release, kind, "*")); err != nil || len(files) == 0 {
				t.Errorf("%s writes records of kind %q and has no fixture of them (%v): %s", release, kind, err, wayOut)
			}
		}
	})
	dirs, err := os.ReadDir("testdata")
	ok(t, err)
	for _, d := range dirs {
		if d.Name() != recordtest.Next && !slices.Contains(testnode.Releases(t), d.Name()) {
			t.Errorf("testdata/%s is of no release in the file releases", d.Name())
		}
	}
}
