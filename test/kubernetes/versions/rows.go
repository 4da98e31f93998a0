package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// row is a line of the file list.
type row struct {
	Name, Kubernetes, Containerd, OCI, Place, Tests string
}

// seen is what the programs of a row reported about themselves while they ran: ask.sh.
type seen struct {
	APIServer, Kubelet, ContainerRuntime, OCI, Cgroups, Kernel, Architecture, Features, Driver string
}

// outcome is a test's result. Words say why, for all but "pass".
type outcome struct{ Result, Words string }

// result is the outcome of a row's run, in results/NAME.json.
type result struct {
	Row    row
	Date   string // the day, UTC
	Commit string // of this project
	Seen   seen
	// Error is why nothing ran: the output of what does not build or start. Empty for a row that
	// ran.
	Error string             `json:",omitempty"`
	Tests map[string]outcome `json:",omitempty"`
}

// columns returns the words of each line of a file that is no comment. Each line must have n.
func columns(path string, n int) ([][]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all [][]string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		if len(words) != n {
			return nil, fmt.Errorf("%s: %q has %d words, not %d", path, lines.Text(), len(words), n)
		}
		all = append(all, words)
	}
	return all, lines.Err()
}

// rows reads the list.
func rows(dir string) ([]row, error) {
	lines, err := columns(filepath.Join(dir, "list"), 6)
	if err != nil {
		return nil, err
	}
	var all []row
	for _, w := range lines {
		all = append(all, row{Name: w[0], Kubernetes: w[1], Containerd: w[2], OCI: w[3], Place: w[4], Tests: w[5]})
	}
	return all, nil
}

// sets are the sets of tests.txt.
var sets = []string{"some", "all", "microvm"}

// tests returns the names of a set. The set "all" includes "some".
func tests(dir, set string) ([]string, error) {
	lines, err := columns(filepath.Join(dir, "tests.txt"), 2)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, w := range lines {
		if w[0] == set || set == "all" && w[0] == "some" {
			names = append(names, w[1])
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("tests.txt has no set %q", set)
	}
	return names, nil
}

// never is the Error of a listed row that has no result yet.
const never = "It was never run."

// results reads the results of these rows. Each must match the row's current line: a row that
// changed in the list must run again before it enters the table.
func results(dir string, of []row) ([]result, error) {
	files, err := filepath.Glob(filepath.Join(dir, "results", "*.json"))
	if err != nil {
		return nil, err
	}
	var all []result
	var errs []error
	for _, r := range of {
		path := filepath.Join(dir, "results", r.Name+".json")
		if i := slices.Index(files, path); i >= 0 {
			files = slices.Delete(files, i, i+1)
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			all = append(all, result{Row: r, Error: never})
			continue
		}
		if err != nil {
			return nil, err
		}
		var got result
		if err := json.Unmarshal(b, &got); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
			continue
		}
		if got.Row != r {
			errs = append(errs, fmt.Errorf("row %s was run as %+v, and the list has %+v: run it again", r.Name, got.Row, r))
			continue
		}
		want, err := tests(dir, r.Tests)
		if err != nil {
			return nil, err
		}
		if err := got.honest(want); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		all = append(all, got)
	}
	if len(files) > 0 {
		errs = append(errs, fmt.Errorf("results of rows that the list does not have: %v", files))
	}
	return all, errors.Join(errs...)
}

// honest returns an error unless the programs report the versions of the row and each of these
// tests has an outcome.
func (r result) honest(tests []string) error {
	if strings.HasSuffix(r.Commit, "-dirty") {
		return fmt.Errorf("%s is no commit: run it again when all is committed", r.Commit)
	}
	if r.Error != "" {
		return nil
	}
	runtime, _, _ := strings.Cut(r.Row.OCI, "-")
	for _, c := range []struct{ what, said, want string }{
		{"the API server", r.Seen.APIServer, "v" + r.Row.Kubernetes + "."},
		{"the kubelet", r.Seen.Kubelet, "v" + r.Row.Kubernetes + "."},
		{"the container runtime", strings.ReplaceAll(r.Seen.ContainerRuntime, "//v", "//"), "containerd://" + r.Row.Containerd + "."},
		{"the OCI runtime", r.Seen.OCI, runtime + " version "},
	} {
		if !strings.HasPrefix(c.said, c.want) {
			return fmt.Errorf("%s says %q, which does not begin with %q", c.what, c.said, c.want)
		}
	}
	if v2 := strings.HasPrefix(r.Seen.Cgroups, "v2"); v2 != strings.HasPrefix(r.Row.Place, "guest") {
		return fmt.Errorf("cgroups are %q on %s", r.Seen.Cgroups, r.Row.Place)
	}
	for _, name := range tests {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(r.Tests)), func(ran string) bool {
			return ran == name || strings.HasPrefix(ran, name+"/")
		}) {
			return fmt.Errorf("%s did not run", name)
		}
	}
	for name, o := range r.Tests {
		if o.Result != "pass" && o.Words == "" {
			return fmt.Errorf("%s: %s, and not a word why", name, o.Result)
		}
	}
	return nil
}
