package main

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestB08_TopFitsTheScreen(t *testing.T) {
	for _, c := range []struct {
		text           string
		columns, lines int
		want           string
	}{
		{"a\nb\n", 0, 0, "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J"},
		{"abcdef\näöüß\n", 3, 10, "\x1b[Habc\x1b[K\r\näöü\x1b[K\x1b[J"},
		{"1\n2\n3\n4\n", 80, 4, "\x1b[H1\x1b[K\r\n2\x1b[K\r\n3\x1b[K\r\n4\x1b[K\x1b[J"},
		{"1\n2\n3\n4\n5\n", 80, 4, "\x1b[H1\x1b[K\r\n2\x1b[K\r\n3\x1b[K\r\n... 2 lines more\x1b[K\x1b[J"},
	} {
		if got := screen(c.text, c.columns, c.lines); got != c.want {
			t.Errorf("%q on %dx%d became\n%q, want\n%q", c.text, c.columns, c.lines, got, c.want)
		}
	}
}

// Text that a pod, a guest or a runtime chose is sanitized before it reaches the terminal.
func TestB08_TopShowsOutsideTextPlainly(t *testing.T) {
	var b strings.Builder
	g := &globals{output: "table"}
	err := g.printView(&b, &view{Node: "n\x1b[2J", Volumes: []busyVolume{{
		For: "shop/\x1b]0;x\a", Users: []string{"pod\x1b[31m"}, Groups: []string{"\n1"}, Labels: []string{"\u202elabel"},
		Sandboxes: []string{"\x1b[1A"}, Trouble: "\x9b",
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\a\u202e") || !utf8.ValidString(b.String()) {
		t.Errorf("%q", b.String())
	}
}
