package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Every listed mutant applies, its test exists, and names are unique. `make mutants` finds out
// whether the tests notice.
func TestEveryMutantCanBeTried(t *testing.T) {
	all, err := readLists("list")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if err := m.check("../.."); err != nil {
			t.Errorf("%s: %s: %v", m.list, m.name, err)
		}
	}
}

func TestAListThatIsNotUnderstood(t *testing.T) {
	const good = "name: a\nfile: a.go\ntest: ./a TestA\nold:\nx\nnew:\ny\n"
	all, err := parse("x.txt", "# words\n---\n"+good+"---\n")
	if err != nil || len(all) != 1 || all[0].old != "x" || all[0].new != "y" || all[0].tests[0] != "TestA" {
		t.Fatalf("%+v %v", all, err)
	}
	if all, err := parse("x.txt", strings.Replace(good, "x\n", "\tx\n\n\t\tz\n", 1)); err != nil || all[0].old != "\tx\n\n\t\tz" {
		t.Errorf("%+v %v", all, err)
	}
	for want, text := range map[string]string{
		"unknown field":     "colour: red\n" + good,
		"a name":            strings.Replace(good, "name: a", "name:", 1),
		"inside the":        strings.Replace(good, "a.go", "../a.go", 1),
		"the same":          strings.Replace(good, "y", "x", 1),
		`"new:" are needed`: strings.Replace(good, "new:\n", "", 1),
		"TestName":          strings.Replace(good, "./a TestA", "./a", 1),
	} {
		if _, err := parse("x.txt", text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: %v", want, err)
		}
	}
}

// repository returns one of a package with a test, and mutants of each outcome.
func repository(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":     "module example.com/m\n\ngo 1.26\n",
		".gitignore": ".cache\n",
		"a/a.go":     "package a\n\nfunc Add(x, y int) int { return x + y }\n\nfunc Sub(x, y int) int { return x - y }\n",
		"a/a_test.go": `package a

import (
	"os"
	"testing"
)

func TestAdd(t *testing.T) {
	if Add(2, 2) != 4 {
		t.Fatal("wrong")
	}
}

func TestBad(*testing.T) { os.Exit(1) } // a line of failure would be counted as one
`,
		"b/go.mod": "module example.com/m/b\n\ngo 1.26\n",
		"b/c/c.go": "package c\n\nconst Three = 3\n",
		"b/c/c_test.go": `package c

import "testing"

func TestThree(t *testing.T) {
	if Three != 3 {
		t.Fatal("wrong")
	}
}
`,
		"list/another-module.txt": `name: is-noticed-in-another-module
file: b/c/c.go
test: ./b/c TestThree
old:
= 3
new:
= 4
---
`,
		"list/a.txt": `name: is-noticed
file: a/a.go
test: ./a TestAdd
old:
x + y
new:
x - y + 0
---
name: survives
file: a/a.go
test: ./a TestAdd
old:
x - y
new:
x + y
---
`,
		"list/b.txt": `name: cannot-be-noticed
file: a/a.go
equivalent: addition has no order
old:
x + y
new:
y + x
---
name: does-not-apply
file: a/a.go
test: ./a TestAdd
old:
x * y
new:
y
---
name: does-not-compile
file: a/a.go
test: ./a TestAdd
old:
x + y
new:
x + z
---
name: bad-test
file: a/a.go
test: ./a TestBad
old:
x + y
new:
x
---
`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(dir, "scripts"), os.DirFS("../../scripts")); err != nil { // own-mounts.sh
		t.Fatal(err)
	}
	commit := []string{"-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-qm", "x"}
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"}, commit} {
		c := exec.Command("git", args...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
	}
	return dir
}

func TestEachOutcomeOfAMutant(t *testing.T) {
	dir := repository(t)
	t.Setenv("TMPDIR", t.TempDir())
	all, err := readLists(filepath.Join(dir, "list"))
	if err != nil {
		t.Fatal(err)
	}
	o := options{root: dir, lists: "list", j: 2, timeout: 5 * time.Minute, others: 1, today: "20260101"}
	got, err := tryAll(context.Background(), o, all)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []outcome{noticed, survived, equivalent, noApply, noCompile, badTest} {
		want := 1
		if o == noticed {
			want = 2 // in both modules
		}
		if got.count[o] != want {
			t.Errorf("%s: %d times, want %d", o, got.count[o], want)
		}
	}
	if len(got.survived) != 1 || got.survived[0] != "survives" {
		t.Errorf("survived: %v", got.survived)
	}
	said := fmt.Sprint(got.verdict())
	for _, want := range []string{"no test noticed survives", "does-not-apply", "does-not-compile", "bad-test"} {
		if !strings.Contains(said, want) {
			t.Errorf("the run's error does not say %q: %s", want, said)
		}
	}
	// Running out of time is reported, and is no failure.
	hurried := o
	hurried.limit = time.Nanosecond
	if none, err := tryAll(context.Background(), hurried, all); err != nil || none.verdict() != nil ||
		!strings.Contains(none.String(), fmt.Sprintf("%d not tried", len(all))) {
		t.Errorf("%v %v", err, none)
	}
	// The tree itself is unchanged, and the copies are gone.
	if out, err := git(context.Background(), dir, "status", "--porcelain"); err != nil || out != "" {
		t.Errorf("%v %s", err, out)
	}
	if left, _ := filepath.Glob(os.TempDir() + "/m*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// An interrupted mutant is no verdict.
	ctx, cancel := context.WithCancel(context.Background())
	tr, err := newTree(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.remove()
	cancel()
	if result, why := tr.try(ctx, all[0]); result != cutShort {
		t.Errorf("%s %s", result, why)
	}
}

func TestWhatChangedIsTried(t *testing.T) {
	dir := repository(t)
	all := func() []mutant {
		all, err := readLists(filepath.Join(dir, "list"))
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	names := func(o options) string {
		t.Helper()
		some, err := choose(context.Background(), o, all())
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, m := range some {
			out = append(out, m.name)
		}
		return strings.Join(out, " ")
	}
	o := options{root: dir, lists: "list", changed: "HEAD", today: "20260101"}
	if got := names(o); got != "" {
		t.Errorf("nothing changed: %s", got)
	}
	o.others = 2
	first := names(o)
	if len(strings.Fields(first)) != 2 || names(o) != first {
		t.Errorf("others: %s, then %s", first, names(o))
	}
	o.others = 0
	// A new record, and then the file of all of them.
	more := "name: new\nfile: a/a.go\ntest: ./a TestAdd\nold:\nAdd\nnew:\nAdds\n"
	if err := os.WriteFile(dir+"/list/c.txt", []byte(more), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := names(o); got != "new" {
		t.Errorf("of a new record: %s", got)
	}
	if err := os.WriteFile(dir+"/a/a.go", []byte("package a\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := names(o); len(strings.Fields(got)) != 7 {
		t.Errorf("of a file that changed: %s", got)
	}
	if o.run = "^is-"; names(o) != "is-noticed" {
		t.Errorf("by name: %s", names(o))
	}
}
