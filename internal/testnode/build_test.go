package testnode

import (
	"os"
	"testing"
)

// The packages that one `make test` runs share what they build.
func TestAProgramIsBuiltOnceForAllPackages(t *testing.T) {
	t.Setenv("CRUST_TEST_BIN", "")
	t.Setenv("CRUST_TEST_BUILDS", t.TempDir())
	p := Program{Name: "filesystems", Package: "github.com/crust-csi/crust-csi/deploy/filesystems"}
	first := p.Build(t)
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	delete(builds.bin, p.Name) // as in another package's tests
	second := p.Build(t)
	delete(builds.bin, p.Name)
	if after, err := os.Stat(second); err != nil || !os.SameFile(before, after) {
		t.Errorf("%s was built again as %s: %v", first, second, err)
	}
}
