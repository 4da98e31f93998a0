package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// notes takes the release's section out of the CHANGELOG.
func (r release) notes() error {
	changes, err := r.read("CHANGELOG.md")
	if err != nil {
		return err
	}
	s, err := section(changes, r.version)
	if err != nil {
		return err
	}
	return r.write("NOTES.md", fmt.Appendf(nil, "# Crust CSI %s\n\n%s\n", s.title, s.body))
}

// dev follows the version of sources that are no release.
const dev = "-dev"

const (
	unreleased = "Unreleased"
	remedy     = `to release, move the text below "## Unreleased" into a section "## vVERSION - YEAR-MONTH-DAY", and write that ` +
		`VERSION into internal/version/VERSION (docs/release.md, "Make one"); DRAFT=1 makes files that are no release`
)

var (
	heading  = regexp.MustCompile(`(?m)^## (.*)$`)
	released = regexp.MustCompile(`^v(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})$`)
)

// part is a section of the CHANGELOG.
type part struct {
	title, body string
	version     string // empty for what is not released
	day         time.Time
}

// parts returns the sections of a CHANGELOG, the newest first.
func parts(changes []byte) ([]part, error) {
	var all []part
	ends := append(heading.FindAllSubmatchIndex(changes, -1), []int{len(changes)})
	for i, at := range ends[:len(ends)-1] {
		p := part{title: string(changes[at[2]:at[3]]), body: string(bytes.TrimSpace(changes[at[1]:ends[i+1][0]]))}
		if m := released.FindStringSubmatch(p.title); m != nil {
			var err error
			if p.day, err = time.Parse(time.DateOnly, m[2]); err != nil {
				return nil, fmt.Errorf("CHANGELOG.md, the section %q: %w", p.title, err)
			}
			p.version = m[1]
		}
		all = append(all, p)
	}
	return all, nil
}

// section returns the notes of a version. A release has the changes of its section and no others. A
// draft has those that are not released, and the day of the last release.
func section(changes []byte, version string) (part, error) {
	all, err := parts(changes)
	if err != nil {
		return part{}, err
	}
	later := slices.IndexFunc(all, func(p part) bool { return p.title == unreleased })
	if strings.HasSuffix(version, dev) {
		last := slices.IndexFunc(all, func(p part) bool { return p.version != "" })
		if later < 0 || last < 0 {
			return part{}, fmt.Errorf("CHANGELOG.md has no section \"## %s\", or no release below it", unreleased)
		}
		return part{title: "v" + version, body: cmp.Or(all[later].body, "Nothing has changed."), day: all[last].day}, nil
	}
	i := slices.IndexFunc(all, func(p part) bool { return p.version == version })
	switch {
	case i < 0:
		return part{}, fmt.Errorf("CHANGELOG.md has no section \"## v%s - YEAR-MONTH-DAY\": %s", version, remedy)
	case later >= 0 && all[later].body != "":
		return part{}, fmt.Errorf("CHANGELOG.md has text below \"## %s\", which the notes of v%s would not have: %s", unreleased, version, remedy)
	case all[i].body == "":
		return part{}, fmt.Errorf("CHANGELOG.md: the section of v%s is empty", version)
	}
	return all[i], nil
}

// plan returns what the sources make: a version and the time of all its files, in seconds. It is the
// release of internal/version/VERSION. If drafts are allowed, sources that are no release make a draft.
func (r release) plan(drafts bool) (string, error) {
	b, err := r.read("internal/version/VERSION")
	if err != nil {
		return "", err
	}
	changes, err := r.read("CHANGELOG.md")
	if err != nil {
		return "", err
	}
	version := strings.TrimSpace(string(b))
	s, err := section(changes, version)
	if err != nil && drafts {
		version += dev
		s, err = section(changes, version)
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %d", version, s.day.Unix()), nil
}

// sums writes the checksums of all files, as sha256sum -c reads them.
func (r release) sums() error {
	found, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	for _, f := range found {
		content, err := os.ReadFile(filepath.Join(r.out, f.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(content), f.Name())
	}
	return r.write("SHA256SUMS", b.Bytes())
}
