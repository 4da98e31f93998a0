package documents

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// A pod's event contains only a health reason and a sentence. docs/troubleshooting.md says what to
// do about each reason, and lists no other.
func TestEveryReasonOfHealthIsInTheTable(t *testing.T) {
	said := reasonsOfHealth(t)
	if len(said) < 15 {
		t.Fatalf("only %d reasons were found: %v", len(said), said)
	}
	b, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## Health's reasons\n")
	section, _, _ = strings.Cut(section, "\n## ")
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| (`+"`[^|]*`"+`) \| .+ \|$`).FindAllStringSubmatch(section, -1) {
		for _, m := range regexp.MustCompile("`([A-Za-z]+)`").FindAllStringSubmatch(row[1], -1) {
			listed[m[1]] = true
		}
	}
	for reason, at := range said {
		if !listed[reason] {
			t.Errorf("%s: the table in docs/troubleshooting.md does not list %s", at, reason)
		}
	}
	for reason := range listed {
		if said[reason] == "" {
			t.Errorf("the table in docs/troubleshooting.md lists %s, which nothing says", reason)
		}
	}
}

// reasonsOfHealth returns the reasons in all literals of mounter.Ailment, and where each one is.
func reasonsOfHealth(t *testing.T) map[string]string {
	files := token.NewFileSet()
	constants, literals := map[string]string{}, map[ast.Expr]bool{}
	for _, top := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir("../../"+top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(files, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ValueSpec:
					for i, v := range n.Values {
						if lit, ok := v.(*ast.BasicLit); ok && lit.Kind == token.STRING {
							constants[n.Names[i].Name], _ = strconv.Unquote(lit.Value)
						}
					}
				case *ast.CompositeLit:
					if list, ok := n.Type.(*ast.ArrayType); ok && isAilment(list.Elt) {
						for _, e := range n.Elts {
							literals[e] = true
						}
					}
					if isAilment(n.Type) {
						literals[n] = true
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	said := map[string]string{}
	for e := range literals {
		lit, ok := e.(*ast.CompositeLit)
		if !ok {
			continue // a variable; its own literal counts
		}
		for _, field := range lit.Elts {
			kv, ok := field.(*ast.KeyValueExpr)
			if !ok || kv.Key.(*ast.Ident).Name != "Reason" {
				continue
			}
			reason := ""
			switch v := kv.Value.(type) {
			case *ast.BasicLit:
				reason, _ = strconv.Unquote(v.Value)
			case *ast.Ident:
				reason = constants[v.Name]
			}
			if reason == "" {
				t.Errorf("%s: which reason is this?", files.Position(kv.Pos()))
				continue
			}
			said[reason] = files.Position(kv.Pos()).String()
		}
	}
	return said
}

func isAilment(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "Ailment"
	case *ast.SelectorExpr:
		return e.Sel.Name == "Ailment"
	}
	return false
}
