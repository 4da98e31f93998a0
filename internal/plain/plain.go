// Package plain makes text from elsewhere safe to show: from a guest, a container runtime, a file
// system's label. Such text gets into events, logs and terminals. There, control characters move
// the cursor, escape sequences do more, and characters that change the writing direction disguise
// the text.
package plain

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Most is a limit for texts that are shown to people, in bytes: a Kubernetes event has 1024.
const Most = 1500

// Text returns s on one line, with at most that many bytes plus a short note if it was cut.
// Unprintable characters are written as in Go strings.
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
