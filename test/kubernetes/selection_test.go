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
// others, which kill, reset and remove things. "alone-1" to "alone-4" have a quarter of these each: .ci/run has time for one.
func restrict() error {
	which := os.Getenv("CRUST_KUBERNETES_TESTS")
	if which == "" {
		return nil
	}
	names, err := alone()
	if err != nil {
		return err
	}
	by := "test.run"
	switch which {
	case "alone":
	case "alone-1", "alone-2", "alone-3", "alone-4":
		names = quarters(names)[which[len(which)-1]-'1']
	case "beside":
		by = "test.skip"
	default:
		return fmt.Errorf("CRUST_KUBERNETES_TESTS is %q: beside, alone, alone-1 to alone-4, or nothing for all", which)
	}
	return flag.Set(by, "^("+strings.Join(names, "|")+")$")
}

// quarters deals the names out to four.
func quarters(names []string) (parts [4][]string) {
	for i, name := range names {
		parts[i%4] = append(parts[i%4], name)
	}
	return parts
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
	parts := quarters(names)
	all := slices.Sorted(slices.Values(slices.Concat(parts[:]...)))
	if len(parts[0])-len(parts[3]) > 1 || !slices.Equal(all, slices.Sorted(slices.Values(names))) {
		t.Errorf("the quarters of %q are %q", names, parts)
	}
}
