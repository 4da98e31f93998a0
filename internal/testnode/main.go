package testnode

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

var builds struct {
	sync.Mutex
	dir string
	bin map[string]string
}

// Build compiles csi-node, once for each set of tags in a test binary.
func Build(t testing.TB, tags string) string { return BuildCommand(t, "csi-node", tags) }

// BuildCommand builds a command of cmd, once for each test binary.
func BuildCommand(t testing.TB, name, tags string) string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	if bin, ok := builds.bin[name+tags]; ok {
		return bin
	}
	if dir := os.Getenv("CRUST_TEST_BIN"); dir != "" {
		return filepath.Join(dir, name+tags) // a guest has no compiler
	}
	if builds.dir == "" {
		dir, err := os.MkdirTemp("", "crust-build-")
		if err != nil {
			t.Fatal(err)
		}
		builds.dir, builds.bin = dir, map[string]string{}
	}
	bin := filepath.Join(builds.dir, name+tags)
	build := exec.Command("go", "build", "-tags", tags, "-o", bin, "github.com/crust-csi/crust-csi/cmd/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as in the images: crust-oci is also the only program of a stub
	out, err := build.CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	builds.bin[name+tags] = bin
	return bin
}

// AtOnce sets how many of a package's parallel tests run at a time, unless -parallel is given.
// Tests with csi-node mostly wait for the kernel, so more tests than processors take no longer.
func AtOnce(tests int) {
	flag.Parse()
	said := false
	flag.Visit(func(f *flag.Flag) { said = said || f.Name == "test.parallel" })
	if said {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(tests)); err != nil {
		panic(err)
	}
}

// Main runs a package's tests in their own temporary directory, and fails if they leave a mount, a
// loop device or a file.
func Main(m *testing.M) {
	dir, err := os.MkdirTemp("", "c") // short: a socket path has at most 108 bytes
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err == nil {
		err = os.Setenv("LC_ALL", "C") // tests read what programs print
	}
	if err != nil {
		println(err.Error())
		os.Exit(1)
	}
	code := m.Run()
	if builds.dir != "" {
		if err := removeTree(builds.dir); err != nil {
			println("remove the built binaries:", err.Error())
			code = 1
		}
	}
	if left := leftovers(dir); left != "" {
		println("the tests left mounts or loop devices:\n" + left)
		code = 1
	}
	if err := os.Remove(dir); err != nil {
		println("the tests left files:", err.Error())
		code = 1
	}
	os.Exit(code)
}

func leftovers(dir string) string {
	var lines []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir+"/") {
			lines = append(lines, line)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, _ := os.ReadFile(l); strings.HasPrefix(string(b), dir+"/") {
			lines = append(lines, l+" "+string(b))
		}
	}
	return strings.Join(lines, "")
}
