package plain

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestALow_TextThatIsNotPlain(t *testing.T) {
	for in, want := range map[string]string{
		"plain, and Ümläute 漢字":          "plain, and Ümläute 漢字",
		"\x1b[2J\x1b]0;title\a":          `\x1b[2J\x1b]0;title\x07`,
		"a\r\nb\tc":                      `a\x0d b c`,
		"user\u202egnp.exe":              `user\u202egnp.exe`,
		"\u2066hidden\u2069\u200b\u00ad": `\u2066hidden\u2069\u200b\u00ad`,
		"\u009b31m":                      `\u009b31m`,
		"\xff\xfe":                       `\xff\xfe`,
		"no\u00a0break":                  "no break",
		"\u2028line":                     `\u2028line`,
		"":                               "",
	} {
		if got := Text(in, Most); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got := Lines("a\n\tb\x1b", Most); got != "a\n\tb\\x1b" {
		t.Errorf("%q", got)
	}
	if got := Text(strings.Repeat("ü", 100), 11); got != strings.Repeat("ü", 5)+"... (190 bytes more)" {
		t.Errorf("%q", got)
	}
}

func FuzzText(f *testing.F) {
	f.Add("\x1b[0m\u202e\xff", 3)
	f.Fuzz(func(t *testing.T, s string, most int) {
		most %= 2000
		got := Text(s, most)
		if !utf8.ValidString(got) || len(got) > max(most, 0)+40 {
			t.Errorf("%q", got)
		}
		for _, r := range got {
			if r < 0x20 || r == 0x7f || r >= 0x80 && r <= 0x9f || r == 0x202e {
				t.Errorf("%q has %q", got, r)
			}
		}
	})
}
