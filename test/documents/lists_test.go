package documents

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// The image of csi-node has the programs of each row, and what csi-node runs besides. No list of them
// is kept up by hand.
func TestTheImageFollowsTheTableOfFilesystems(t *testing.T) {
	out, err := exec.Command(project + "/deploy/image/packages.sh").Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	for _, program := range fstype.Programs() {
		if p := fstype.PackageOf(program); !slices.Contains(packages, p) {
			t.Errorf("the image lacks %s, which has %s", p, program)
		}
	}
	static, err := os.ReadFile(project + "/deploy/image/packages")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(strings.Fields(string(static)), "kmod", "mount", "util-linux") {
		if !slices.Contains(packages, p) {
			t.Errorf("the image lacks %s", p)
		}
	}
}

// A script that goes through the file systems asks the table: `go run ./deploy/filesystems names`.
func TestScriptsListNoFilesystems(t *testing.T) {
	var scripts []string
	for _, in := range []string{"deploy/image", "scripts", "test/vm"} {
		found, err := filepath.Glob(filepath.Join(project, in, "*.sh"))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v %v", in, found, err)
		}
		scripts = append(scripts, found...)
	}
	for _, script := range scripts {
		b, err := os.ReadFile(script)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			words := strings.FieldsFunc(line, func(r rune) bool { return !unicode.IsLower(r) && !unicode.IsDigit(r) })
			named := slices.DeleteFunc(slices.Clone(fstype.Formats()), func(name string) bool { return !slices.Contains(words, name) })
			if len(named) > 1 {
				t.Errorf("%s lists file systems: %s", script, strings.TrimSpace(line))
			}
		}
	}
}
