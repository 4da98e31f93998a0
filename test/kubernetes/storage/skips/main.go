// Command skips reads a report of Kubernetes' storage suite (ginkgo's JSON) and checks that the
// table of docs/conformance.md gives a reason for each skipped spec. It prints how many specs
// passed, failed and were skipped for which reason.
//
//	skips report.json docs/conformance.md
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

const heading = "## Kubernetes' storage suite"

var quoted = regexp.MustCompile("`([^`]+)`")

// reasons returns the quoted texts of the table's first column. Each is part of the suite's message
// for a skipped spec.
func reasons(page string) []string {
	var all []string
	_, section, _ := strings.Cut(page, heading)
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
	State   string
	Failure struct{ Message string }
}

// count sorts the specs. Those that were not requested have no message.
func count(specs []spec, reasons []string) (counts map[string]int, unknown []string) {
	counts = map[string]int{}
	for _, s := range specs {
		message := s.Failure.Message
		switch {
		case s.State != "skipped":
			counts[s.State]++
		case message == "": // left out by focus or skip
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

func run(report, page string) error {
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
	known := reasons(string(text))
	var specs []spec
	for _, s := range suites {
		specs = append(specs, s.SpecReports...)
	}
	counts, unknown := count(specs, known)
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
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "skips REPORT.json conformance.md")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
