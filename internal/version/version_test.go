package version

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("../../" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestTheVersionIsTheReleasesOrAheadOfIt(t *testing.T) {
	if !regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+\n$`).MatchString(release) {
		t.Errorf("VERSION is %q", release)
	}
	if got := String(); got != strings.TrimSpace(release)+"-dev" {
		t.Errorf("an ordinary build is %q", got)
	}
	number = "1.2.3"
	defer func() { number = "" }()
	if got := String(); got != number {
		t.Errorf("the build of a release is %q", got)
	}
}

// The CHANGELOG's first release is this one, and newer changes are above it.
func TestTheChangelogHasTheVersion(t *testing.T) {
	titles := regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(read(t, "CHANGELOG.md"), 2)
	if len(titles) != 2 || titles[0][1] != "Unreleased" {
		t.Fatalf("CHANGELOG.md begins with the sections %q", titles)
	}
	want := regexp.MustCompile(`^v` + regexp.QuoteMeta(strings.TrimSpace(release)) + ` - \d{4}-\d{2}-\d{2}$`)
	if !want.MatchString(titles[1][1]) {
		t.Errorf("its first release is %q, VERSION is %s", titles[1][1], release)
	}
}

// A second copy of the version would be forgotten at the next release.
func TestNothingElseNamesTheVersion(t *testing.T) {
	for _, name := range []string{
		"Makefile", "deploy/image/build.sh", "deploy/image/compile.sh", "scripts/release.sh", "scripts/release-check.sh",
	} {
		if strings.Contains(read(t, name), strings.TrimSpace(release)) {
			t.Errorf("%s has the version; take it from internal/version/VERSION", name)
		}
	}
	// The Helm chart must contain the version: `make release` compares it, and so does this.
	chart, err := os.ReadFile("../../deploy/helm/crust-csi/Chart.yaml")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, line := range regexp.MustCompile(`(?m)^(?:version|appVersion): "?([^"\n]*)"?$`).FindAllStringSubmatch(string(chart), -1) {
		if line[1] != strings.TrimSpace(release) {
			t.Errorf("Chart.yaml: %s", line[0])
		}
	}
}
