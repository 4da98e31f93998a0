package version

import (
	"fmt"
	"os"
	"regexp"
	"slices"
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

func TestAnOrdinaryBuildIsNoRelease(t *testing.T) {
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

// numbers returns a version's three numbers.
func numbers(t *testing.T, version string) []int {
	t.Helper()
	n := make([]int, 3)
	if _, err := fmt.Sscanf(version, "%d.%d.%d", &n[0], &n[1], &n[2]); err != nil {
		t.Fatalf("the version %q: %v", version, err)
	}
	return n
}

// Semantic versions sort 0.1.0-dev before 0.1.0. So VERSION names the next release as soon as something
// has changed since the last one: a build of today then sorts after the last release and before the next.
func TestABuildIsNewerThanTheLastRelease(t *testing.T) {
	changes := read(t, "CHANGELOG.md")
	sections := regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatchIndex(changes, 2)
	if len(sections) != 2 || changes[sections[0][2]:sections[0][3]] != "Unreleased" {
		t.Fatalf("CHANGELOG.md begins with %d sections, want \"Unreleased\" and the last release", len(sections))
	}
	title := changes[sections[1][2]:sections[1][3]]
	last := regexp.MustCompile(`^v(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$`).FindStringSubmatch(title)
	if last == nil {
		t.Fatalf("its first release is %q, not vVERSION - YEAR-MONTH-DAY", title)
	}
	unreleased := strings.TrimSpace(changes[sections[0][1]:sections[1][0]])
	switch order := slices.Compare(numbers(t, release), numbers(t, last[1])); {
	case order < 0:
		t.Errorf("VERSION is %s, and v%s is released", strings.TrimSpace(release), last[1])
	case order == 0 && unreleased != "":
		t.Errorf("CHANGELOG.md has unreleased changes, and VERSION is that of the release v%s: change it to the next version", last[1])
	}
	for _, line := range strings.Split(read(t, "test/skew/releases"), "\n") {
		if version, _, ok := strings.Cut(line, " "); ok && strings.HasPrefix(version, "v") &&
			slices.Compare(numbers(t, release), numbers(t, version[1:])) <= 0 {
			t.Errorf("VERSION is %s, and test/skew/releases has the release %s: change it to the next version",
				strings.TrimSpace(release), version)
		}
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
	chart := read(t, "deploy/helm/crust-csi/Chart.yaml")
	lines := regexp.MustCompile(`(?m)^(?:version|appVersion): "?([^"\n]*)"?$`).FindAllStringSubmatch(chart, -1)
	if len(lines) != 2 {
		t.Errorf("Chart.yaml has %d versions, want version and appVersion", len(lines))
	}
	for _, line := range lines {
		if line[1] != strings.TrimSpace(release)+"-dev" {
			t.Errorf("Chart.yaml: %s; want %s-dev, which make release replaces", line[0], strings.TrimSpace(release))
		}
	}
}
