package documents

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A reader of the source sees 140 columns. Tables, code and what a run writes (docs/versions.md) are as long as they are.
func TestMarkdownEndsByColumn140(t *testing.T) {
	seen := 0
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".md" || d.Name() == "versions.md" {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		seen++
		code := false
		for i, line := range strings.Split(string(b), "\n") {
			fence := strings.HasPrefix(strings.TrimSpace(line), "```")
			if fence {
				code = !code
			}
			if !code && !fence && !strings.HasPrefix(line, "|") && len([]rune(line)) > 140 {
				t.Errorf("%s:%d ends at column %d", strings.TrimPrefix(path, "../../"), i+1, len([]rune(line)))
			}
		}
		return nil
	})
	if err != nil || seen < 20 {
		t.Errorf("%d documents, %v", seen, err)
	}
}
