// Package plain makes text that somebody else chose harmless to show: a guest's, a
// container runtime's, a file system's label. Such text gets into events, logs and
// terminals, where control characters move the cursor, escape sequences do more,
// and characters that change the direction of writing show something else than
// what is there.
package plain

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Most is a bound for texts that are shown to people, in bytes: an event of
// Kubernetes has 1024.
const Most = 1500

// Text is s on one line, of at most that many bytes and a few for saying that there
// was more. What cannot be printed is written as Go writes it in strings.
func Text(s string, most int) string { return show(s, most, false) }

// Lines is Text that keeps line ends and tabs.
func Lines(s string, most int) string { return show(s, most, true) }

func show(s string, most int, lines bool) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		var piece string
		switch {
		case r == utf8.RuneError && size == 1:
			piece = fmt.Sprintf(`\x%02x`, s[i])
		case lines && (r == '\n' || r == '\t'), unicode.IsPrint(r):
			piece = s[i : i+size]
		case !lines && (r == '\n' || r == '\t'), unicode.Is(unicode.Zs, r):
			piece = " "
		case r < 0x80:
			piece = fmt.Sprintf(`\x%02x`, r)
		default:
			piece = fmt.Sprintf(`\u%04x`, r)
		}
		if b.Len()+len(piece) > most {
			return b.String() + fmt.Sprintf("... (%d bytes more)", len(s)-i)
		}
		b.WriteString(piece)
		i += size
	}
	return b.String()
}
