package documents

import (
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// A link to a file of the project leads to an existing file and heading.
func TestLinksLeadSomewhere(t *testing.T) {
	checked := 0
	eachDocument(t, func(path, text string) {
		for _, m := range link.FindAllStringSubmatch(withoutCode(text), -1) {
			u, err := url.Parse(m[1])
			if err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			if u.Scheme != "" {
				continue
			}
			checked++
			to := path
			if u.Path != "" {
				to = filepath.Join(filepath.Dir(path), u.Path)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %s: %v", path, m[1], err)
				continue
			}
			if u.Fragment != "" && !anchors(t, to)[u.Fragment] {
				t.Errorf("%s: %s has no heading #%s", path, to, u.Fragment)
			}
		}
	})
	if checked < 100 {
		t.Errorf("%d links: there are more", checked)
	}
}

// eachDocument calls f for each Markdown file.
func eachDocument(t *testing.T, f func(path, text string)) {
	t.Helper()
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "../.." {
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ".md" {
			return nil
		}
		b, err := os.ReadFile(path)
		if err == nil {
			f(path, string(b))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

var fence = regexp.MustCompile("(?ms)^```.*?^```")

func withoutCode(text string) string { return fence.ReplaceAllString(text, "") }

// anchors returns the link names of a Markdown file's headings.
func anchors(t *testing.T, path string) map[string]bool {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for line := range strings.Lines(withoutCode(string(b))) {
		if heading, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			found[anchor(heading)] = true
		}
	}
	return found
}

// anchor returns GitHub's anchor for a heading.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, strings.TrimSpace(link.ReplaceAllString(heading, "")))
}

// Nobody finds a page that is not in the index.
func TestTheIndexHasEveryPage(t *testing.T) {
	b, err := os.ReadFile("../../docs/README.md")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		if name := filepath.Base(p); name != "README.md" && !strings.Contains(string(b), "("+name+")") {
			t.Errorf("docs/README.md has no link to %s", name)
		}
	}
}
