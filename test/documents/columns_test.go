package documents

import (
	"path/filepath"
	"strings"
	"testing"
)

// Markdown lines end by column 140. Tables, code and generated pages (docs/versions.md) may be
// longer.
func TestMarkdownEndsByColumn140(t *testing.T) {
	seen := 0
	eachDocument(t, func(path, text string) {
		if filepath.Base(path) == "versions.md" {
			return
		}
		seen++
		code := false
		for i, line := range strings.Split(text, "\n") {
			fence := strings.HasPrefix(strings.TrimSpace(line), "```")
			if fence {
				code = !code
			}
			if !code && !fence && !strings.HasPrefix(line, "|") && len([]rune(line)) > 140 {
				t.Errorf("%s:%d ends at column %d", strings.TrimPrefix(path, "../../"), i+1, len([]rune(line)))
			}
		}
	})
	if seen < 20 {
		t.Errorf("%d documents: there are more", seen)
	}
}
