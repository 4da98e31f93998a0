package documents

import (
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// Public packages export no type that importers cannot name.
func TestPackagesExportNoInternalType(t *testing.T) {
	for _, p := range exported(t, "./pkg/...") {
		for _, name := range p.Scope().Names() {
			if o := p.Scope().Lookup(name); o.Exported() {
				seen := surface{from: p, met: map[types.Type]bool{}}
				seen.object(o)
				for _, hidden := range seen.hidden {
					t.Errorf("%s.%s shows %s", strings.TrimPrefix(p.Path(), module), name, hidden)
				}
			}
		}
	}
}

var name = regexp.MustCompile(`\b([a-z]+)\.([A-Z]\w*)(?:\.([A-Z]\w*))?`)

// Every name on the page for driver authors exists.
func TestNamesOfTheLibraryPageExist(t *testing.T) {
	packages := map[string]*types.Package{}
	for _, p := range exported(t, "./pkg/...") {
		packages[p.Name()] = p
	}
	b, err := os.ReadFile("../../docs/library.md")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, m := range name.FindAllStringSubmatch(string(b), -1) {
		p := packages[m[1]]
		if p == nil {
			continue // another project's
		}
		checked++
		o := p.Scope().Lookup(m[2])
		if o == nil {
			t.Errorf("docs/library.md: %s exports no %s", m[1], m[2])
			continue
		}
		if m[3] != "" {
			if found, _, _ := types.LookupFieldOrMethod(o.Type(), true, p, m[3]); found == nil {
				t.Errorf("docs/library.md: %s.%s has no %s", m[1], m[2], m[3])
			}
		}
	}
	if checked < 15 {
		t.Errorf("%d names: there are more", checked)
	}
}

const module = "github.com/crust-csi/crust-csi/"

// exported returns the packages that match the patterns, with their exported names.
func exported(t *testing.T, patterns ...string) (packages []*types.Package) {
	t.Helper()
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}\t{{.DepOnly}}")
	list.Args = append(list.Args, patterns...)
	list.Dir, list.Stderr = "../..", os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	var matched []string
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		files[f[0]] = f[1]
		if f[2] == "false" {
			matched = append(matched, f[0])
		}
	}
	read := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) { return os.Open(files[path]) })
	for _, path := range matched {
		p, err := read.Import(path)
		if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
	if len(packages) == 0 {
		t.Fatalf("%s matches no package", patterns)
	}
	return packages
}

// surface is what a name shows to importers of its package.
type surface struct {
	from   *types.Package
	met    map[types.Type]bool
	hidden []string
}

func (s *surface) object(o types.Object) {
	s.of(o.Type())
	if o, ok := o.(*types.TypeName); ok {
		s.of(o.Type().Underlying())
		if named, ok := o.Type().(*types.Named); ok {
			for m := range named.Methods() {
				if m.Exported() {
					s.of(m.Type())
				}
			}
		}
	}
}

func (s *surface) of(t types.Type) {
	if t == nil || s.met[t] {
		return
	}
	s.met[t] = true
	switch t := t.(type) {
	case *types.Alias:
		s.named(t.Obj())
		s.of(t.Rhs())
	case *types.Named:
		s.named(t.Obj())
		for a := range t.TypeArgs().Types() {
			s.of(a)
		}
	case *types.Pointer:
		s.of(t.Elem())
	case *types.Slice:
		s.of(t.Elem())
	case *types.Array:
		s.of(t.Elem())
	case *types.Chan:
		s.of(t.Elem())
	case *types.Map:
		s.of(t.Key())
		s.of(t.Elem())
	case *types.Signature:
		for v := range t.Params().Variables() {
			s.of(v.Type())
		}
		for v := range t.Results().Variables() {
			s.of(v.Type())
		}
	case *types.Struct:
		for f := range t.Fields() {
			if f.Exported() {
				s.of(f.Type())
			}
		}
	case *types.Interface:
		for m := range t.Methods() {
			s.of(m.Type())
		}
	}
}

// named records a type that importers cannot name: one of an internal package, or an unexported
// one.
func (s *surface) named(o *types.TypeName) {
	generated := strings.Contains(o.Name(), "_") && strings.HasPrefix(o.Name(), "is") // the interface of a protobuf oneof
	if o.Pkg() == nil || !strings.HasPrefix(o.Pkg().Path(), module) || generated {
		return
	}
	if strings.Contains(o.Pkg().Path(), "/internal/") || !o.Exported() {
		s.hidden = append(s.hidden, o.Pkg().Path()+"."+o.Name())
	}
}
