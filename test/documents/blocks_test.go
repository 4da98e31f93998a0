package documents

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var notRun = regexp.MustCompile("(?ms)^```console\n(.*?)^```$")

// TestInstallDoc runs the sh blocks of docs/install.md, and the console blocks of the chart's page. So a console block of
// docs/install.md has the chart's commands and no others.
func TestTheChartsCommandsAgree(t *testing.T) {
	read := func(path string) string {
		t.Helper()
		b, err := os.ReadFile("../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	chart := map[string]bool{}
	for _, m := range notRun.FindAllStringSubmatch(read("deploy/helm/crust-csi/README.md"), -1) {
		for line := range strings.Lines(m[1]) {
			chart[line] = true
		}
	}
	blocks := notRun.FindAllStringSubmatch(read("docs/install.md"), -1)
	for _, m := range blocks {
		for line := range strings.Lines(m[1]) {
			if !chart[line] {
				t.Errorf("docs/install.md: no test runs %q", line)
			}
		}
	}
	if len(blocks) == 0 || len(chart) == 0 {
		t.Errorf("%d blocks, %d lines of the chart's page", len(blocks), len(chart))
	}
}
