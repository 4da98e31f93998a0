package main

import (
	"strings"
	"testing"
	"time"
)

func TestTheNotesAreTheReleasesSection(t *testing.T) {
	r := made(t)
	ok(t, r.notes())
	if got := get(t, r.out+"/NOTES.md"); got != "# Crust CSI v9.8.7 - 2026-01-01\n\nnow\n" {
		t.Errorf("%q", got)
	}
	for _, changes := range []string{
		"## v9.8.70 - 2026-01-01\n\nx\n", "## v9.8.7 - 2026-01-01\n\n## v1.0.0 - 2025-01-01\n\nx\n", "## v9.8.7\n\nx\n",
		"## v9.8.7 - 2026-13-01\n\nx\n", "## v9.8.7 - 2026-01-01 (late)\n\nx\n",
	} {
		if s, err := section([]byte(changes), "9.8.7"); err == nil {
			t.Errorf("%q: %+v", changes, s)
		}
	}
}

// plans puts a version and a CHANGELOG into sources, and returns what they make.
func plans(t *testing.T, version, changes string, drafts bool) (string, error) {
	t.Helper()
	r := release{project: t.TempDir()}
	put(t, r.project+"/internal/version/VERSION", version+"\n")
	put(t, r.project+"/CHANGELOG.md", changes)
	return r.plan(drafts)
}

// Sources whose CHANGELOG has unreleased changes are not those of VERSION's release.
func TestAReleaseHasNothingUnreleased(t *testing.T) {
	const (
		released = "## v9.8.7 - 2026-01-01\n\nnow\n"
		changed  = "# Changes\n\n## Unreleased\n\n### Fixed\n\nlater\n\n"
	)
	got, err := plans(t, "9.8.7", "# Changes\n\n## Unreleased\n\n"+released, false)
	if err != nil || got != "9.8.7 1767225600" {
		t.Errorf("of a release: %q, %v", got, err)
	}
	for version, begins := range map[string]string{
		"9.8.7": "CHANGELOG.md has text below \"## Unreleased\", which the notes of v9.8.7 would not have",
		"9.9.0": "CHANGELOG.md has no section \"## v9.9.0 - YEAR-MONTH-DAY\"",
	} {
		got, err := plans(t, version, changed+released, false)
		if err == nil || !strings.HasPrefix(err.Error(), begins) {
			t.Errorf("%s: %q, %v", version, got, err)
			continue
		}
		for _, remedy := range []string{"move the text", "internal/version/VERSION", "docs/release.md", "DRAFT=1"} {
			if !strings.Contains(err.Error(), remedy) {
				t.Errorf("%s: without %q: %v", version, remedy, err)
			}
		}
	}
	// The program that writes the files refuses, too, whoever starts it.
	r := made(t)
	put(t, r.project+"/CHANGELOG.md", changed+released)
	if err := r.notes(); err == nil || !strings.Contains(err.Error(), "Unreleased") {
		t.Errorf("notes of a release with unreleased changes: %v", err)
	}
}

// release-check compares two builds at any commit: what is no release is built as a draft, under a
// version that is none. A release stays one.
func TestADraftIsNoRelease(t *testing.T) {
	const changes = "# Changes\n\n## Unreleased\n\nlater\n\n## v9.8.7 - 2026-01-01\n\nnow\n"
	got, err := plans(t, "9.9.0", changes, true)
	if err != nil || got != "9.9.0-dev 1767225600" {
		t.Errorf("%q, %v", got, err)
	}
	got, err = plans(t, "9.8.7", strings.Replace(changes, "later", "", 1), true)
	if err != nil || got != "9.8.7 1767225600" {
		t.Errorf("of a release: %q, %v", got, err)
	}
	for body, want := range map[string]string{"later": "later", "": "Nothing has changed."} {
		s, err := section([]byte(strings.Replace(changes, "later", body, 1)), "9.9.0-dev")
		if err != nil || s.title != "v9.9.0-dev" || s.body != want || !s.day.Equal(time.Unix(1767225600, 0)) {
			t.Errorf("%+v, %v", s, err)
		}
	}
	for _, changes := range []string{"# Changes\n", "## Unreleased\n\nlater\n", "## v9.8.7 - 2026-01-01\n\nnow\n"} {
		if got, err := plans(t, "9.9.0", changes, true); err == nil {
			t.Errorf("%q: %q", changes, got)
		}
	}
}
