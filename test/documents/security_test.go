// Package documents checks the documents against the code.
package documents

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const project = "../.."

// tests returns the test functions of the tree, whatever their build tags.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(project, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range f.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil &&
				(strings.HasPrefix(fn.Name.Name, "Test") || strings.HasPrefix(fn.Name.Name, "Fuzz")) {
				names[fn.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// A09: every test that SECURITY.md names exists, and every row names one.
func TestA09_SecurityNamesTestsThatExist(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(project, "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	exist := tests(t)
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9_]+)`").FindAllStringSubmatch(string(b), -1)
	if len(exist) < 100 || len(named) < 10 {
		t.Fatalf("%d tests, of which SECURITY.md names %d", len(exist), len(named))
	}
	for _, n := range named {
		if !exist[n[1]] {
			t.Errorf("SECURITY.md names %s, which does not exist", n[1])
		}
	}
	rows := 0
	for line := range strings.Lines(string(b)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || strings.Contains(cells[1], "---") || strings.TrimSpace(cells[1]) == "actor" {
			continue
		}
		rows++
		if !strings.Contains(cells[4], "`Test") {
			t.Errorf("a row without a test: %s", line)
		}
	}
	if rows < 10 {
		t.Errorf("%d rows", rows)
	}
}
