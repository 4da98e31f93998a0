package testnode

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Program is a program that tests run.
type Program struct {
	Name    string // of its file: no other program of any package's tests has it
	Package string
	Dir     string // whose module Package is looked up in; "" means the test's
	Tags    string
	Cgo     bool // part of it is C. Others are static, as in the images: some run where there are no libraries
}

var builds struct {
	sync.Mutex
	dir string
	bin map[string]string
}

// Build compiles csi-node.
func Build(t testing.TB, tags string) string { return BuildCommand(t, "csi-node", tags) }

// BuildCommand compiles a command of cmd.
func BuildCommand(t testing.TB, name, tags string) string {
	t.Helper()
	return Program{Name: name, Package: "github.com/crust-csi/crust-csi/cmd/" + name, Tags: tags}.Build(t)
}

// Build builds a program, once for each test binary, and returns its file. `make test` names a directory in CRUST_TEST_BUILDS: all packages
// share what they build there, because linking takes longer than most tests. CRUST_TEST_BIN has programs for a guest without a compiler.
func (p Program) Build(t testing.TB) string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	key := p.Name + p.Tags
	if bin, ok := builds.bin[key]; ok {
		return bin
	}
	if dir := os.Getenv("CRUST_TEST_BIN"); dir != "" {
		return filepath.Join(dir, key)
	}
	if builds.bin == nil {
		builds.bin = map[string]string{}
	}
	dir := cmp.Or(os.Getenv("CRUST_TEST_BUILDS"), builds.dir)
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "crust-build-"); err != nil {
			t.Fatal(err)
		}
		builds.dir = dir
	}
	builds.bin[key] = p.share(t, filepath.Join(dir, key))
	return builds.bin[key]
}

// share builds a program unless another package's tests have.
func (p Program) share(t testing.TB, bin string) string {
	t.Helper()
	lock, err := os.OpenFile(bin+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := linux.FlockWithin(t.Context(), lock); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err == nil {
		return bin
	}
	p.build(t, bin+".new")
	if err := os.Rename(bin+".new", bin); err != nil {
		t.Fatal(err)
	}
	return bin
}

func (p Program) build(t testing.TB, bin string) {
	t.Helper()
	c := exec.Command("go", "build", "-tags", p.Tags, "-o", bin, p.Package)
	c.Dir = p.Dir
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if p.Cgo {
		c.Env = append(os.Environ(), "CGO_ENABLED=1")
	}
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
}
