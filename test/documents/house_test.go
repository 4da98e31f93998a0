package documents

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

type room struct {
	name  string
	floor int
}

// rooms reads the list of docs/architecture.md: the room of each path of packages.
func rooms(t *testing.T) map[string]room {
	t.Helper()
	page, err := os.ReadFile(project + "/docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(page), "\nfloor  room          packages\n")
	list, _, found := strings.Cut(list, "```")
	if !found {
		t.Fatal("docs/architecture.md has no list of rooms")
	}
	const name, packages = 7, 21 // columns
	of := map[string]room{}
	var r room
	for line := range strings.Lines(list) {
		if head := strings.TrimSpace(line[:packages]); head != "" {
			if r.floor, err = strconv.Atoi(strings.TrimSpace(line[:name])); err != nil {
				t.Fatal(err)
			}
			r.name = strings.TrimSpace(line[name:packages])
		}
		for p := range strings.FieldsSeq(line[packages:]) {
			if other, twice := of[p]; twice {
				t.Errorf("%s is in the rooms %s and %s", p, other.name, r.name)
			}
			of[p] = r
		}
	}
	return of
}

// imports lists the project's packages that each of its packages imports, tests aside.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	c := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./cmd/...", "./internal/...", "./pkg/...")
	c.Dir = project
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		own := []string{}
		for _, i := range f[1:] {
			if p, ok := strings.CutPrefix(i, module); ok {
				own = append(own, p)
			}
		}
		all[strings.TrimPrefix(f[0], module)] = own
	}
	return all
}

// The house has few rooms and floors, each package is in one room, and imports lead down.
func TestTheHouse(t *testing.T) {
	listed, graph := rooms(t), imports(t)
	used := map[string]bool{}
	find := func(p string) room {
		for at := p; ; at = at[:strings.LastIndex(at, "/")] {
			if r, ok := listed[at]; ok {
				used[at] = true
				return r
			}
			if !strings.Contains(at, "/") {
				t.Errorf("%s is in no room of docs/architecture.md", p)
				return room{}
			}
		}
	}
	names, floors := []string{}, []int{}
	for p, list := range graph {
		from := find(p)
		names, floors = append(names, from.name), append(floors, from.floor)
		for _, i := range list {
			if to := find(i); to.name != from.name && to.floor >= from.floor {
				t.Errorf("%s (room %s, floor %d) imports %s (room %s, floor %d)", p, from.name, from.floor, i, to.name, to.floor)
			}
		}
	}
	for p := range listed {
		if !used[p] {
			t.Errorf("docs/architecture.md has a room for %s, which has no package", p)
		}
	}
	slices.Sort(names)
	slices.Sort(floors)
	if r, f := len(slices.Compact(names)), len(slices.Compact(floors)); r > 12 || f > 6 {
		t.Errorf("%d rooms on %d floors; more than 12 or 6 are no longer a drawing", r, f)
	}
}
