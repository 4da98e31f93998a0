package documents

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// A file system is a row of pkg/mounter/fstype. No other code spells its name, so a new one touches
// nothing else. Exceptions: detectors return what they found, and NFS is mounted differently.
func TestAFilesystemIsNamedInItsRow(t *testing.T) {
	names := map[string]bool{}
	for _, row := range fstype.All() {
		names[row.Name] = true
	}
	constants := constantsOf(t, "../../pkg/mounter/fstype/rows.go")
	ofDetectors := map[string]bool{"pkg/mounter/superblock": true}
	seen := 0
	for _, top := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir("../../"+top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			in := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../../")
			if in == "pkg/mounter/fstype" {
				return nil
			}
			seen++
			files := token.NewFileSet()
			f, err := parser.ParseFile(files, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.BasicLit:
					if s, err := strconv.Unquote(n.Value); err == nil && names[s] {
						t.Errorf("%s: %q is named; ask its row", files.Position(n.Pos()), s)
					}
				case *ast.SelectorExpr:
					x, ok := n.X.(*ast.Ident)
					if !ok || x.Name != "fstype" || x.Obj != nil || n.Sel.Name == "NFS" || ofDetectors[in] {
						break
					}
					if constants[n.Sel.Name] {
						t.Errorf("%s: fstype.%s is for detectors; ask its row", files.Position(n.Pos()), n.Sel.Name)
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
	if seen < 100 {
		t.Errorf("only %d files were looked at", seen)
	}
}

// constantsOf returns the names of the constants that a file declares.
func constantsOf(t *testing.T, path string) map[string]bool {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, d := range f.Decls {
		if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.CONST {
			for _, spec := range g.Specs {
				for _, name := range spec.(*ast.ValueSpec).Names {
					found[name.Name] = true
				}
			}
		}
	}
	if !found["Ext4"] {
		t.Fatalf("the constants of %s are %v", path, found)
	}
	return found
}
