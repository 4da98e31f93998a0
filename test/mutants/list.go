package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// mutant is one break of the code, and the test that notices it.
type mutant struct {
	name       string
	file       string   // relative to the repository
	pkg        string   // of the test, as "./test/node"
	tests      []string // functions, or "Function/subtest"; one must fail; of a fuzz target only the seeds run
	tags       string   // build tags of the test
	equivalent string   // why no test can notice it; such a mutant does not run
	old, new   string

	list   string // file that it was read from
	record string // the record's text
}

// parse reads a list of records, separated by lines "---". Each has the fields name, file, test,
// old and new; tags and equivalent are optional. The text of old and new begins on the next line,
// and "new:" and "---" end it. Lines with # between records are comments.
func parse(list, text string) ([]mutant, error) {
	var out []mutant
	for record := range strings.SplitSeq("\n"+text+"\n", "\n---\n") {
		if strings.TrimSpace(record) == "" {
			continue
		}
		m, err := parseRecord(record)
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", list, m.name, err)
		}
		if m.name == "" {
			continue // comments only
		}
		m.list, m.record = list, strings.TrimSpace(record)
		out = append(out, m)
	}
	return out, nil
}

func parseRecord(record string) (mutant, error) {
	var m mutant
	head, rest, found := strings.Cut("\n"+strings.Trim(record, "\n")+"\n", "\nold:\n")
	for line := range strings.Lines(head) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch key {
		case "name":
			m.name = value
		case "file":
			m.file = value
		case "tags":
			m.tags = value
		case "equivalent":
			m.equivalent = value
		case "test":
			if fields := strings.Fields(value); len(fields) > 0 {
				m.pkg, m.tests = fields[0], fields[1:]
			}
		default:
			return m, fmt.Errorf("unknown field %q", key)
		}
	}
	if !found && m.name == "" {
		return m, nil
	}
	old, replacement, both := strings.Cut("\n"+rest, "\nnew:\n")
	m.old, m.new = strings.TrimPrefix(old, "\n"), strings.TrimSuffix(replacement, "\n")
	switch {
	case m.name == "" || strings.ContainsAny(m.name, " \t"):
		return m, fmt.Errorf("a name without spaces is needed")
	case m.file == "" || filepath.IsAbs(m.file) || !filepath.IsLocal(m.file):
		return m, fmt.Errorf("file %q: a path inside the repository is needed", m.file)
	case !found || !both || m.old == "":
		return m, fmt.Errorf("the lines \"old:\", its text, and \"new:\" are needed")
	case m.old == m.new:
		return m, fmt.Errorf("old and new are the same")
	case m.equivalent == "" && (!strings.HasPrefix(m.pkg, "./") || len(m.tests) == 0):
		return m, fmt.Errorf("test: \"./package TestName\" is needed")
	}
	return m, nil
}

// apply returns the file's text before and with the mutant.
func (m mutant) apply(root string) (was, is []byte, err error) {
	was, err = os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return nil, nil, err
	}
	if n := strings.Count(string(was), m.old); n != 1 {
		return nil, nil, fmt.Errorf("its old text occurs %d times in %s; it must occur once", n, m.file)
	}
	return was, []byte(strings.Replace(string(was), m.old, m.new, 1)), nil
}

// functions returns the test functions that notice it.
func (m mutant) functions() []string {
	var out []string
	for _, t := range m.tests {
		f, _, _ := strings.Cut(t, "/")
		out = append(out, f)
	}
	return out
}

// check returns why the mutant cannot run: it does not apply, or its test does not exist.
func (m mutant) check(root string) error {
	if _, _, err := m.apply(root); err != nil || m.equivalent != "" {
		return err
	}
	files, err := filepath.Glob(filepath.Join(root, m.pkg, "*_test.go"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("package %s has no tests (%v)", m.pkg, err)
	}
	var all strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		all.Write(b)
	}
	for _, name := range m.functions() {
		if !regexp.MustCompile(`(?m)^func ` + regexp.QuoteMeta(name) + `\(\w+ \*testing\.[TF]\)`).MatchString(all.String()) {
			return fmt.Errorf("%s has no func %s(t *testing.T)", m.pkg, name)
		}
	}
	return nil
}

// readLists reads all lists of a directory. Names must be unique across all of them.
func readLists(dir string) ([]mutant, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no lists in %s (%v)", dir, err)
	}
	slices.Sort(files)
	var all []mutant
	seen := map[string]string{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		some, err := parse(filepath.Base(f), string(b))
		if err != nil {
			return nil, err
		}
		for _, m := range some {
			if in, twice := seen[m.name]; twice {
				return nil, fmt.Errorf("%s: the name %s is in %s already", m.list, m.name, in)
			}
			seen[m.name] = m.list
		}
		all = append(all, some...)
	}
	return all, nil
}
