package main

import (
	"archive/tar"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A base of another architecture is checked with its own programs.
func TestABaseOfAnotherArchitectureIsChecked(t *testing.T) {
	native, err := exec.Command("dpkg", "--print-architecture").Output()
	ok(t, err)
	arch, emulator := "arm64", "qemu-aarch64-static"
	if strings.TrimSpace(string(native)) == arch {
		arch, emulator = "amd64", "qemu-x86_64-static"
	}
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", filepath.Join(dir, emulator), "./testdata/emulator")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // a base has no libraries
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	rows, err := exec.Command("go", "run", "-C", "../..", "./deploy/filesystems", "packages").Output()
	ok(t, err)
	names := []string{"usr/sbin/modprobe", "usr/bin/sh", "usr/bin/dpkg-query", "usr/bin/dpkg"}
	for line := range strings.Lines(string(rows)) {
		program, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		names = append(names, "usr/sbin/"+program)
	}
	// check runs check.sh of a base with these programs.
	check := func(names []string) (string, error) {
		t.Helper()
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, name := range []string{"usr/", "usr/bin/", "usr/sbin/", "proc/", "tmp/", "var/", "var/lib/", "var/lib/dpkg/"} {
			ok(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}))
		}
		for _, link := range []string{"bin", "sbin"} {
			ok(t, w.WriteHeader(&tar.Header{Name: link, Typeflag: tar.TypeSymlink, Linkname: "usr/" + link}))
		}
		for _, name := range append(names, "var/lib/dpkg/status") {
			text := "Package: a\n"
			ok(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))}))
			_, err := w.Write([]byte(text))
			ok(t, err)
		}
		ok(t, w.Close())
		base := filepath.Join(dir, "base.tar")
		ok(t, os.WriteFile(base, b.Bytes(), 0o600))
		c := exec.Command("./check.sh", arch, base)
		c.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := c.CombinedOutput()
		return string(out), err
	}
	if out, err := check(names); err != nil || !strings.Contains(out, "check: "+arch+": the programs start, 1 packages") {
		t.Errorf("of a good base: %v: %s", err, out)
	}
	if out, err := check(names[:4]); err == nil || !strings.Contains(out, "check: "+arch+": the base has no mkfs.") {
		t.Errorf("of a base without programs: %v: %s", err, out)
	}
}

// B10: whoever builds the images with a container builder gets the packages that build.sh takes.
func TestB10_TheDockerfileHasThePackages(t *testing.T) {
	b, err := os.ReadFile("Dockerfile")
	ok(t, err)
	file := regexp.MustCompile(`(?m)^COPY (\S+) /tmp/packages$`).FindSubmatch(b)
	if file == nil || !strings.Contains(string(b), "`deploy/image/packages.sh >"+string(file[1])+"`") {
		t.Errorf("the packages are those of %s, which no command makes", file)
	}
	out, err := exec.Command("./packages.sh").Output()
	ok(t, err)
	for _, want := range []string{"xfsprogs", "btrfs-progs", "e2fsprogs", "f2fs-tools", "util-linux"} {
		if !slices.Contains(strings.Fields(string(out)), want) {
			t.Errorf("%s is not among the packages: %s", want, out)
		}
	}
}
