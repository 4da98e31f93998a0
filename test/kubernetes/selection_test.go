//go:build kubernetes

package kubernetes_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// restrict leaves tests out, if CRUST_KUBERNETES_TESTS says so: "beside" has those that use the cluster beside each other, "alone" the
// others, which kill, reset and remove things. .ci/run has no time for the latter on a slow machine.
func restrict() error {
	which := os.Getenv("CRUST_KUBERNETES_TESTS")
	if which == "" {
		return nil
	}
	by, known := map[string]string{"beside": "test.skip", "alone": "test.run"}[which]
	if !known {
		return fmt.Errorf("CRUST_KUBERNETES_TESTS is %q: beside or alone, or nothing for all", which)
	}
	names, err := alone()
	if err != nil {
		return err
	}
	return flag.Set(by, "^("+strings.Join(names, "|")+")$")
}

// alone returns the tests of this package that do not call t.Parallel.
func alone() ([]string, error) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if ok && strings.HasPrefix(f.Name.Name, "Test") && f.Name.Name != "TestMain" && !slices.ContainsFunc(f.Body.List, parallel) {
				names = append(names, f.Name.Name)
			}
		}
	}
	return names, nil
}

// parallel tells whether a statement is t.Parallel().
func parallel(s ast.Stmt) bool {
	call, ok := s.(*ast.ExprStmt)
	if !ok {
		return false
	}
	c, ok := call.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	f, ok := c.Fun.(*ast.SelectorExpr)
	return ok && f.Sel.Name == "Parallel"
}

func TestATestRunsBesideOthersOrAlone(t *testing.T) {
	t.Parallel()
	names, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(names, "TestNodeReset") || slices.Contains(names, "TestDynamicVolumes") || slices.Contains(names, t.Name()) {
		t.Errorf("alone run %q", names)
	}
}
