package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

const head = `# Versions

This page shows what was run. ` + "`make test-versions`" +
	` builds each row's programs, starts a node with them, installs the driver with CRUST
from its ordinary manifests, and runs the tests named below, which are in ` + "`test/kubernetes`" + `. That run writes the table; the
versions are those that the running programs report. It is not edited by hand: a test compares it with the records in
` + "`test/kubernetes/versions/results`" + `. Rows are pairs, not every combination. Every row's control plane is of the kubelet's version.

`

// table writes docs/versions.md.
func table(all []result, names func(set string) ([]string, error)) (string, error) {
	var b strings.Builder
	b.WriteString(head)
	b.WriteString("| row | Kubernetes | containerd | OCI runtime | cgroups | kernel | tests | passed | failed | not supported | when | commit |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		if r.Error != "" {
			what := "did not run"
			if r.Error == never {
				what = "never run"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | | | %s | %s | | | %s | %s |\n",
				r.Row.Name, r.Row.Kubernetes, r.Row.Containerd, r.Row.OCI, r.Row.Tests, what, r.Date, r.Commit)
			continue
		}
		kubernetes := strings.TrimPrefix(r.Seen.Kubelet, "v")
		if r.Seen.APIServer != r.Seen.Kubelet {
			kubernetes += ", API server " + strings.TrimPrefix(r.Seen.APIServer, "v")
		}
		hierarchies := []string{}
		for part := range strings.SplitSeq(r.Seen.Cgroups, ", ") {
			name, _, _ := strings.Cut(part, " (")
			hierarchies = append(hierarchies, name)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %d | %d | %d | %s | %s |\n", r.Row.Name, kubernetes,
			strings.TrimPrefix(strings.TrimPrefix(r.Seen.ContainerRuntime, "containerd://"), "v"),
			strings.Replace(r.Seen.OCI, " version", "", 1),
			strings.Join(hierarchies, ", "), r.Seen.Kernel, r.Row.Tests, r.count("pass"), r.count("fail"),
			r.count("refused"), r.Date, r.Commit)
	}
	b.WriteString("\nA test of which every part has a name (`TestDynamicVolumes/xfs`) counts as its parts.\n")
	for _, s := range []struct{ title, none, result string }{
		{"What failed", "Nothing.", "fail"},
		{"What an older program does not support", "Nothing.", "refused"},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n", s.title)
		lines := reasons(all, s.result)
		if s.result == "refused" && lines != "" {
			b.WriteString("The tests check that a pod that asks for it is refused and does not run without it. The refusals:\n\n")
		}
		if lines == "" {
			lines = s.none + "\n"
		}
		b.WriteString(lines)
	}
	b.WriteString("\n## What did not run\n\n")
	none := true
	for _, r := range all {
		if r.Error == never {
			none = false
			fmt.Fprintf(&b, "- %s (Kubernetes %s, containerd %s, %s, %s) was never run: `make test-versions VERSIONSFLAGS='-only ^%s$'` does.\n", r.Row.Name,
				r.Row.Kubernetes, r.Row.Containerd, r.Row.OCI, r.Row.Place, r.Row.Name)
		} else if r.Error != "" {
			none = false
			fmt.Fprintf(&b, "- %s (Kubernetes %s, containerd %s, %s):\n\n  ```text\n  %s\n  ```\n", r.Row.Name, r.Row.Kubernetes,
				r.Row.Containerd, r.Row.OCI,
				strings.ReplaceAll(strings.TrimSpace(r.Error), "\n", "\n  "))
		}
	}
	if none {
		b.WriteString("Every row ran.\n")
	}
	b.WriteString("\n## The cgroups\n\nAs the kubelet of each row sees them, with their controllers:\n\n")
	for _, group := range grouped(all, func(r result) string { return r.Seen.Cgroups }) {
		fmt.Fprintf(&b, "- %s\n", group)
	}
	b.WriteString("\n## The tests\n")
	for _, set := range sets {
		list, err := names(set)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n%s:\n\n", set)
		for _, n := range list {
			fmt.Fprintf(&b, "- `%s`\n", n)
		}
	}
	return b.String(), nil
}

func (r result) count(what string) int {
	n := 0
	for _, o := range r.Tests {
		if o.Result == what {
			n++
		}
	}
	return n
}

// reasons lists the tests with this result, each with its words.
func reasons(all []result, what string) string {
	var b strings.Builder
	for _, r := range all {
		for _, name := range slices.Sorted(maps.Keys(r.Tests)) {
			if o := r.Tests[name]; o.Result == what {
				fmt.Fprintf(&b, "- %s, `%s`:\n\n  ```text\n  %s\n  ```\n", r.Row.Name, name,
					strings.ReplaceAll(strings.TrimSpace(o.Words), "\n", "\n  "))
			}
		}
	}
	return b.String()
}

// grouped returns each value once, with the rows that have it.
func grouped(all []result, of func(result) string) []string {
	rows := map[string][]string{}
	var values []string
	for _, r := range all {
		v := of(r)
		if v == "" {
			continue
		}
		if rows[v] == nil {
			values = append(values, v)
		}
		rows[v] = append(rows[v], r.Row.Name)
	}
	for i, v := range values {
		values[i] = strings.Join(rows[v], ", ") + ": " + v
	}
	return values
}
