// Package man checks the manual pages that `make man` writes.
package man

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

// pages runs a program that writes its pages, and returns them by name.
func pages(t *testing.T, program string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command(testnode.BuildCommand(t, program, "man"), dir).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	all := map[string]string{}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		var shown, complaints bytes.Buffer
		c := exec.Command("groff", "-man", "-Tutf8", "-ww", "-Wbreak", "-rLL=2000n", "-P-c", name) // long words are no error
		c.Stdout, c.Stderr = &shown, &complaints
		if err := c.Run(); err != nil || complaints.Len() > 0 {
			t.Errorf("%s: %v\n%s", filepath.Base(name), err, complaints.String())
		}
		// Overstruck letters are bold or underlined; lines are justified.
		plain := regexp.MustCompile(`.\x08`).ReplaceAllString(shown.String(), "")
		all[filepath.Base(name)] = strings.Join(strings.Fields(plain), " ")
	}
	return all
}

func TestB08_EveryCommandHasAManualPage(t *testing.T) {
	all := pages(t, "crustctl")
	for name, words := range map[string][]string{
		"crustctl.8":                  {"crustctl-pool(8)", "--endpoint"},
		"crustctl-pool-check.8":       {"--persistent-volumes", "EXAMPLE", "The exit code is 0"},
		"crustctl-node-drain-check.8": {"--remove"}, "crustctl-support-bundle.8": {"--output", "no secrets"}, "crustctl-top.8": {"--once"},
		"crustctl-history.8": {"--claim"}, "crustctl-volume-show.8": {"NAMESPACE/NAME"}, "crustctl-sandbox-list.8": {"--crust"},
		"crustctl-doctor.8": {"doctor"},
	} {
		for _, w := range words {
			if !strings.Contains(all[name], w) {
				t.Errorf("%s has not a word of %q:\n%s", name, w, all[name])
			}
		}
	}
}

func TestB08_TheManualPageOfCsiNodeHasItsFlags(t *testing.T) {
	page := pages(t, "csi-node")["csi-node.8"]
	help, err := exec.Command(testnode.BuildCommand(t, "csi-node", ""), "-h").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile(`(?m)^  -([a-z-]+)`).FindAllSubmatch(help, -1)
	if len(flags) < 15 {
		t.Errorf("%d flags in\n%s", len(flags), help)
	}
	for _, f := range flags {
		if !strings.Contains(page, "-"+string(f[1])) {
			t.Errorf("--%s is not in the page:\n%s", f[1], page)
		}
	}
	if _, err := os.Stat("csi-node.8"); err == nil {
		t.Error("a page was written where it was not wanted")
	}
}
