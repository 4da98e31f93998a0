package testnode

import (
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

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
