package mounter

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func TestC20_PatternsOfDevices(t *testing.T) {
	for _, c := range []struct {
		pattern, path       string
		matches, literally  bool
		malformed, relative bool
	}{
		{pattern: "/dev/sda", path: "/dev/sda", matches: true, literally: true},
		{pattern: "/dev/sd*", path: "/dev/sda", matches: true},
		{pattern: "/dev/*", path: "/dev/mapper/x"},
		{pattern: "/dev/[", path: "/dev/[", matches: true, literally: true, malformed: true},
		{pattern: "/dev/[", path: "/dev/x", malformed: true},
		{pattern: "dev/*", path: "dev/x", matches: true, relative: true},
	} {
		p := Pattern(c.pattern)
		if ok, literally := p.Matches(c.path); ok != c.matches || literally != c.literally {
			t.Errorf("%s matches %s: %v, literally %v", c.pattern, c.path, ok, literally)
		}
		if err := p.Check(); fault.Is(err, fault.Invalid) != (c.malformed || c.relative) {
			t.Errorf("%s: %v", c.pattern, err)
		}
	}
}

// C20: a pattern permits neither a link nor a partition. A path that is written out permits both.
func TestC20_APatternForDisksPermitsNoPartition(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(disk, nil, 0o600), os.Truncate(disk, 16<<20)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "-P", "-f", "--show", disk).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v\n%s", err, out)
	}
	whole := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "-d", whole).CombinedOutput(); err != nil {
			t.Errorf("losetup -d: %v\n%s", err, out)
		}
	})
	if out, err := exec.Command("addpart", whole, "1", "2048", "8192").CombinedOutput(); err != nil { // whatever tables this kernel reads
		t.Fatalf("addpart: %v\n%s", err, out)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(whole, link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path      string
		literally bool
		refusal   string
	}{
		{whole, false, ""},
		{whole, true, ""},
		{whole + "p1", false, "is a partition"},
		{whole + "p1", true, ""},
		{link, false, "symbolic link to " + whole},
		{link, true, ""},
	} {
		d, err := FindExact(c.path, c.literally)
		if refused := fault.Is(err, fault.Invalid); refused != (c.refusal != "") || refused && !strings.Contains(err.Error(), c.refusal) ||
			!refused && (err != nil || d.Path != c.path) {
			t.Errorf("%s, literally %v: %+v, %v", c.path, c.literally, d, err)
		}
	}
	if d, err := FindNamed(link); err != nil || d.Path != whole {
		t.Errorf("through a link: %+v, %v", d, err)
	}
	// Where a link leads is not opened: opening some devices has effects.
	nowhere := filepath.Join(t.TempDir(), "nowhere")
	if err := os.Symlink(disk, nowhere); err != nil {
		t.Fatal(err)
	}
	if _, err := FindExact(nowhere, false); !fault.Is(err, fault.Invalid) {
		t.Errorf("a link to what is no device: %v", err)
	}
	for _, find := range []func() (Device, error){
		func() (Device, error) { return FindExact(disk+"-none", false) },
		func() (Device, error) { return FindNamed(disk + "-none") },
	} {
		if _, err := find(); !fault.Is(err, fault.State) {
			t.Errorf("a device that is not there: %v", err)
		}
	}
}
