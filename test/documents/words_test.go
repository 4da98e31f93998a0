package documents

import (
	"go/scanner"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// phrases are turns that readers stumbled over, each with what to write in its place.
var phrases = []struct {
	bad     *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?m)(^|[.:;] )Where [a-z][^.?!|]*,`), "if ..., or the condition last"},
	{regexp.MustCompile(`\b[Tt]he like\b`), "name them, or: and similar"},
	{regexp.MustCompile(`\b([Mm]ade|[Mm]akes?|[Mm]aking) sure of\b`), "verifies, checks, ensures"},
	{regexp.MustCompile(`\b[Ww]hat is known of\b`), "everything about"},
	{regexp.MustCompile(`\b(is|are) told (of|that|by|what|whether)\b`), "gets, receives; or say who reports or queries it"},
	{regexp.MustCompile(`\bas ever\b`), "as usual"},
	{regexp.MustCompile(`\blooks? (whether|whom)\b|\b(it|tests?) looks? that\b`), "checks whether"},
	{regexp.MustCompile(`\b[Nn]obody knows\b`), "is unknown"},
	{regexp.MustCompile(`\b(of )?its own doing\b`), "caused by itself"},
	{regexp.MustCompile(`\bstands? in one place\b`), "is defined once"},
	{regexp.MustCompile(`\b(had|made|has) anew\b`), "again, newly created"},
	{regexp.MustCompile(`\bcan nothing\b|\bwhat it can[.,;]`), "capabilities"},
	{regexp.MustCompile(`\b[Tt]hat which\b`), "what"},
	{regexp.MustCompile(`\b[Aa]t no moment\b`), "never"},
	{regexp.MustCompile(`\bis (no more|any more)\b`), "no longer exists"},
}

// Prose is plain English: subject first, one thought a sentence. The test knows turns of phrase that were found in this
// project before; it does not know English.
func TestNoPhraseThatReadersStumbledOver(t *testing.T) {
	check := func(path, prose string) {
		for _, p := range phrases {
			for _, found := range p.bad.FindAllString(prose, -1) {
				t.Errorf("%s: %q: write %q", path, strings.TrimSpace(found), p.instead)
			}
		}
	}
	eachDocument(t, func(path, text string) {
		if filepath.Base(path) != "CHANGELOG.md" { // what was released is not rewritten
			check(strings.TrimPrefix(path, "../../"), withoutCode(text))
		}
	})
	eachGoFile(t, func(path string, text []byte) {
		if path != "test/documents/words_test.go" {
			check(path, comments(text))
		}
	})
}

var (
	paragraphs = regexp.MustCompile(`\n\s*\n|\n(?:[-*#]|\d+\.) `)
	sentences  = regexp.MustCompile(`[.?!:;]\s+`)
)

// A longer sentence has more than one thought. Rows of tables are not sentences.
func TestSentencesHaveAtMost40Words(t *testing.T) {
	const most = 40
	eachDocument(t, func(path, text string) {
		if filepath.Base(path) == "CHANGELOG.md" {
			return
		}
		for _, paragraph := range paragraphs.Split(withoutCode(text), -1) {
			if strings.HasPrefix(strings.TrimSpace(paragraph), "|") {
				continue
			}
			for _, sentence := range sentences.Split(paragraph, -1) {
				if n := len(strings.Fields(sentence)); n > most {
					t.Errorf("%s: %d words: %q", strings.TrimPrefix(path, "../../"), n, sentence)
				}
			}
		}
	})
}

// comments returns the text of a Go file's comments. Lines that follow each other are one paragraph.
func comments(text []byte) string {
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	var all strings.Builder
	last := 0
	for {
		pos, kind, word := s.Scan()
		if kind == token.EOF {
			return all.String()
		}
		if kind != token.COMMENT {
			continue
		}
		line := file.Line(pos)
		if line > last+1 {
			all.WriteString("\n")
		} else {
			all.WriteString(" ")
		}
		last = line
		all.WriteString(strings.TrimSpace(strings.TrimPrefix(word, "//")))
	}
}
