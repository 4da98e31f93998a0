package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A mutant that does not compile proves nothing, and .ci/run tries only some of them. Packages are type-checked with the mutant:
// that takes milliseconds where go build takes a second.
func TestEveryMutantCompiles(t *testing.T) {
	all, err := readLists("list")
	if err != nil {
		t.Fatal(err)
	}
	tr := &tree{root: "../.."}
	modules := map[string]*module{}
	for _, m := range all {
		if !strings.HasSuffix(m.file, ".go") {
			continue
		}
		dir, _ := tr.module(filepath.Dir(m.file))
		mod := modules[dir]
		if mod == nil {
			if mod, err = loadModule(filepath.Join(tr.root, dir)); err != nil {
				t.Fatal(err)
			}
			modules[dir] = mod
		}
		_, text, err := m.apply(tr.root)
		if err == nil {
			err = mod.check(filepath.Join(tr.root, m.file), text)
		}
		if err != nil {
			t.Errorf("%s: %s: %v", m.list, m.name, err)
		}
	}
}

func TestAMutantThatDoesNotCompileIsFound(t *testing.T) {
	dir := repository(t)
	mod, err := loadModule(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ text, want string }{
		{"package a\n\nfunc Add(a, b int) int { return a - b }\n", ""},
		{"package a\n\nfunc Add(a, b int) int { sum := a + b; return a }\n", "declared and not used"},
		{"package a\n\nfunc Add(a, b int) int { return \"a\" }\n", "cannot use"},
		{"package a\n\nfunc Add(a, b int) int { return a +\n", "expected"},
	} {
		err := mod.check(filepath.Join(dir, "a/a.go"), []byte(c.text))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: want %q: %v", c.text, c.want, err)
		}
	}
	if err := mod.check(filepath.Join(dir, "other/a.go"), nil); err == nil {
		t.Error("a file of no package passes")
	}
}

// module holds what type-checking one package of a Go module needs.
type module struct {
	set      *token.FileSet
	packages map[string]*source // by directory
	imports  types.Importer
}

// source is a package as go list describes it.
type source struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
	Module                  *struct{ GoVersion string }

	parsed map[string]*ast.File
}

// loadModule builds the module's packages and what they import.
func loadModule(dir string) (*module, error) {
	cmd := exec.Command("go", "list", "-C", dir, "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles,Module", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w", dir, err)
	}
	m := &module{set: token.NewFileSet(), packages: map[string]*source{}}
	exports := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &source{parsed: map[string]*ast.File{}}
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		exports[p.ImportPath], m.packages[p.Dir] = p.Export, p
	}
	m.imports = importer.ForCompiler(m.set, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("no package of the module imports %s", path)
		}
		return os.Open(exports[path])
	})
	return m, nil
}

// check returns the errors of the file's package with the text in the file's place.
func (m *module) check(file string, text []byte) error {
	file, err := filepath.Abs(file)
	if err != nil {
		return err
	}
	p := m.packages[filepath.Dir(file)]
	if p == nil {
		return fmt.Errorf("%s: go list names no package there", file)
	}
	var files []*ast.File
	for _, name := range p.GoFiles {
		path, parsed := filepath.Join(p.Dir, name), p.parsed[name]
		if path == file {
			parsed, err = parser.ParseFile(m.set, path, text, parser.SkipObjectResolution)
		} else if parsed == nil {
			parsed, err = parser.ParseFile(m.set, path, nil, parser.SkipObjectResolution)
			p.parsed[name] = parsed
		}
		if err != nil {
			return err
		}
		files = append(files, parsed)
	}
	var all []error
	config := types.Config{Importer: m.imports, Error: func(err error) { all = append(all, err) }}
	if p.Module != nil && p.Module.GoVersion != "" {
		config.GoVersion = "go" + p.Module.GoVersion
	}
	_, _ = config.Check(p.ImportPath, m.set, files, nil) // config.Error has collected the errors
	return errors.Join(all...)
}
