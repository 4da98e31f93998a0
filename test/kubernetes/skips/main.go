// Command skips reads a report of a part of Kubernetes' end-to-end tests (ginkgo's JSON) and checks that the table of docs/conformance.md
// gives a reason for each skipped spec. It prints how many specs passed, failed, were skipped for which reason, and were left out by which
// pattern.
//
//	skips report.json docs/conformance.md SECTION FOCUS PATTERN...
//
// SECTION is the heading above the table.
// FOCUS selected the specs. The patterns are those that ginkgo left out.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

var quoted = regexp.MustCompile("`([^`]+)`")

// reasons returns the quoted texts of the first column of a section's table. Each is part of the suite's message for a skipped spec.
func reasons(page, heading string) []string {
	var all []string
	_, section, _ := strings.Cut(page, "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, "|"); len(cells) > 2 {
			for _, m := range quoted.FindAllStringSubmatch(cells[1], -1) {
				all = append(all, m[1])
			}
		}
	}
	return all
}

type spec struct {
	State                   string
	Failure                 struct{ Message string }
	ContainerHierarchyTexts []string
	LeafNodeText            string
}

// selection is how ginkgo chose specs by their text.
type selection struct {
	focus *regexp.Regexp
	skip  []*regexp.Regexp
}

func parseSelection(focus string, skip, reasons []string) (selection, error) {
	var sel selection
	var err error
	if sel.focus, err = regexp.Compile(focus); err != nil {
		return sel, err
	}
	for _, p := range skip {
		re, err := regexp.Compile(p)
		if err != nil {
			return sel, err
		}
		if !slices.Contains(reasons, plain(re)) {
			return sel, fmt.Errorf("specs that match %q are left out, and the table of docs/conformance.md has no row for them", p)
		}
		sel.skip = append(sel.skip, re)
	}
	return sel, nil
}

// plain is a pattern as the table writes it.
func plain(re *regexp.Regexp) string { return strings.ReplaceAll(re.String(), `\`, "") }

// count sorts the specs. Those that ginkgo left out have no message.
func count(specs []spec, sel selection, reasons []string) (counts map[string]int, unknown []string) {
	counts = map[string]int{}
	for _, s := range specs {
		message, text := s.Failure.Message, strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
		switch {
		case s.State != "skipped":
			counts[s.State]++
		case message == "" && !sel.focus.MatchString(text):
		case message == "":
			i := slices.IndexFunc(sel.skip, func(re *regexp.Regexp) bool { return re.MatchString(text) })
			if i < 0 {
				unknown = append(unknown, text)
				continue
			}
			counts["left out: "+plain(sel.skip[i])]++
		default:
			i := slices.IndexFunc(reasons, func(r string) bool { return strings.Contains(message, r) })
			if i < 0 {
				unknown = append(unknown, message)
				continue
			}
			counts["skipped: "+reasons[i]]++
		}
	}
	slices.Sort(unknown)
	return counts, slices.Compact(unknown)
}

func run(report, page, section, focus string, skip []string) error {
	b, err := os.ReadFile(report)
	if err != nil {
		return err
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(b, &suites); err != nil {
		return fmt.Errorf("%s: %w", report, err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	known := reasons(string(text), section)
	sel, err := parseSelection(focus, skip, known)
	if err != nil {
		return err
	}
	var specs []spec
	for _, s := range suites {
		specs = append(specs, s.SpecReports...)
	}
	counts, unknown := count(specs, sel, known)
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		fmt.Printf("%5d %s\n", counts[what], what)
	}
	if len(unknown) > 0 {
		return fmt.Errorf("skipped for a reason that %s does not have:\n%s", page, strings.Join(unknown, "\n"))
	}
	if counts["passed"] == 0 {
		return errors.New("no spec passed")
	}
	return nil
}

func main() {
	if len(os.Args) < 5 {
		fmt.Fprintln(os.Stderr, "skips REPORT.json conformance.md SECTION FOCUS PATTERN...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
