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
// others, which kill, reset and remove things. "alone-1" and "alone-2" have a half of these each: .ci/run has time for one.
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
	case "alone-1":
		names, _ = halves(names)
	case "alone-2":
		_, names = halves(names)
	case "beside":
		by = "test.skip"
	default:
		return fmt.Errorf("CRUST_KUBERNETES_TESTS is %q: beside, alone, alone-1 or alone-2, or nothing for all", which)
	}
	return flag.Set(by, "^("+strings.Join(names, "|")+")$")
}

// halves deals the names out to two.
func halves(names []string) (one, other []string) {
	for i, name := range names {
		if i%2 == 0 {
			one = append(one, name)
		} else {
			other = append(other, name)
		}
	}
	return one, other
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
	one, other := halves(names)
	both := slices.Sorted(slices.Values(slices.Concat(one, other)))
	if len(one)-len(other) > 1 || !slices.Equal(both, slices.Sorted(slices.Values(names))) {
		t.Errorf("the halves of %q are %q and %q", names, one, other)
	}
}
