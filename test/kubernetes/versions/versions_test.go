package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The page matches the results, and each row of the list has one. The test fails if somebody edits
// one of them by hand, or changes the list without a run.
func TestVersions_ThePageIsMadeByTheRuns(t *testing.T) {
	list, err := rows(".")
	if err != nil {
		t.Fatal(err)
	}
	all, err := results(".", list)
	if err != nil {
		t.Error(err)
	}
	want, err := table(all, func(set string) ([]string, error) { return tests(".", set) })
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../../docs/versions.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/versions.md is not what the records give: go run ./test/kubernetes/versions -write")
	}
}

// Every name in tests.txt is a test: an unknown name would run nothing.
func TestVersions_TheTestsExist(t *testing.T) {
	var text strings.Builder
	for _, f := range []string{"volumes", "crust", "support", "microvm"} {
		b, err := os.ReadFile("../" + f + "_test.go")
		if err != nil {
			t.Fatal(err)
		}
		text.Write(b)
	}
	for _, set := range sets {
		names, err := tests(".", set)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			if !strings.Contains(text.String(), "\nfunc "+n+"(t *testing.T)") {
				t.Errorf("no test is called %s", n)
			}
		}
	}
}

const events = `{"Action":"start"}
{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/xfs"}
{"Action":"run","Test":"TestA/ext4"}
{"Action":"output","Test":"TestA/xfs","Output":"    volumes_test.go:20: in the pod: nothing\n"}
{"Action":"output","Test":"TestA/xfs","Output":"    cluster_test.go:200: events:\n"}
{"Action":"fail","Test":"TestA/xfs"}
{"Action":"pass","Test":"TestA/ext4"}
{"Action":"fail","Test":"TestA"}
{"Action":"run","Test":"TestB"}
{"Action":"output","Test":"TestB","Output":"    support_test.go:50: not supported: containerd://1.7.35 has no userNamespaces\n"}
{"Action":"pass","Test":"TestB"}
{"Action":"run","Test":"TestS"}
{"Action":"output","Test":"TestS","Output":"    support_test.go:50: not supported: today\n"}
{"Action":"skip","Test":"TestS"}
{"Action":"run","Test":"TestC"}
{"Action":"run","Test":"TestD"}
{"Action":"run","Test":"TestD/part"}
{"Action":"pass","Test":"TestD/part"}
{"Action":"output","Test":"TestD","Output":"    volumes_test.go:9: left behind\n"}
{"Action":"fail","Test":"TestD"}
`

func TestVersions_OutcomesOfARun(t *testing.T) {
	got, err := outcomes([]byte(events))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]outcome{
		"TestA/xfs":  {"fail", "in the pod: nothing"},
		"TestA/ext4": {Result: "pass"},
		"TestB":      {"refused", "containerd://1.7.35 has no userNamespaces"},
		"TestS":      {"fail", "not supported: today"},
		"TestC":      {"fail", "it did not end"},
		"TestD":      {"fail", "left behind"},
		"TestD/part": {Result: "pass"},
	}
	if len(got) != len(want) {
		t.Errorf("%v", got)
	}
	for name, o := range want {
		if got[name] != o {
			t.Errorf("%s: %v, want %v", name, got[name], o)
		}
	}
}

const asked = `apiServer: v1.34.4
kubelet: v1.34.4
containerRuntime: containerd://v1.7.35
kernel: 6.18.44
architecture: amd64
oci: crun version 1.8.1
cgroups: v1 (cpu memory)
features: 
driver: 0.1.0-dev
`

func TestVersions_AnswersOfPrograms(t *testing.T) {
	got, err := answers(asked)
	if err != nil || got.OCI != "crun version 1.8.1" || got.APIServer != "v1.34.4" || got.Cgroups != "v1 (cpu memory)" {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := answers(asked + "oci: runc version 1.5.2\n"); err == nil {
		t.Error("containers of two runtimes are one row")
	}
	if _, err := answers(strings.Replace(asked, "oci: crun version 1.8.1\n", "", 1)); err == nil {
		t.Error("a runtime that says nothing is in the table")
	}
}

// A row enters the table only if the programs had the versions of the row, and every test has an
// outcome.
func TestVersions_ARowIsWhatRan(t *testing.T) {
	said, err := answers(asked)
	if err != nil {
		t.Fatal(err)
	}
	good := func() result {
		return result{Row: row{"oldest", "1.34", "1.7", "crun", "machine", "all"}, Date: "2026-11-23", Commit: "0123456789ab", Seen: said,
			Tests: map[string]outcome{"TestA/ext4": {Result: "pass"}, "TestB": {"refused", "no such thing"}}}
	}
	names := []string{"TestA", "TestB"}
	if err := good().honest(names); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(*result){
		"another API server":         func(r *result) { r.Seen.APIServer = "v1.36.3" },
		"another kubelet":            func(r *result) { r.Seen.Kubelet = "v1.36.3" },
		"another containerd":         func(r *result) { r.Seen.ContainerRuntime = "containerd://v2.4.2" },
		"another OCI runtime":        func(r *result) { r.Seen.OCI = "runc version 1.5.2" },
		"another hierarchy":          func(r *result) { r.Row.Place = "guest-6.12" },
		"a test that did not run":    func(r *result) { delete(r.Tests, "TestA/ext4") },
		"no word why":                func(r *result) { r.Tests["TestB"] = outcome{Result: "refused"} },
		"a tree that is no commit's": func(r *result) { r.Commit += "-dirty" },
	} {
		r := good()
		change(&r)
		if err := r.honest(names); err == nil {
			t.Errorf("in the table: %s", what)
		}
	}
}

func TestVersions_TheTable(t *testing.T) {
	said, err := answers(asked)
	if err != nil {
		t.Fatal(err)
	}
	said.Cgroups = "v1 (cpu memory), beside v2 (hugetlb)"
	text, err := table([]result{
		{Row: row{"oldest", "1.34", "1.7", "crun", "machine", "all"}, Date: "2026-11-23", Commit: "0123456789ab", Seen: said,
			Tests: map[string]outcome{
				"TestA/ext4": {Result: "pass"}, "TestA/xfs": {Result: "pass"}, "TestB": {"refused", "no such thing"},
				"TestC": {"fail", "it broke\ninto two"}}},
		{Row: row{"broken", "1.99", "1.7", "runc", "machine", "all"}, Date: "2026-11-23", Commit: "0123456789ab",
			Error: "undefined: kubelet.New"},
	}, func(string) ([]string, error) { return []string{"TestA", "TestB", "TestC"}, nil })
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| oldest | 1.34.4 | 1.7.35 | crun 1.8.1 | v1, beside v2 | 6.18.44 | all | 2 | 1 | 1 | 2026-11-23 | 0123456789ab |\n",
		"| broken | 1.99 | 1.7 | runc | | | all | did not run | | | 2026-11-23 | 0123456789ab |\n",
		"- oldest, `TestC`:\n\n  ```text\n  it broke\n  into two\n", "- oldest, `TestB`:\n\n  ```text\n  no such thing\n",
		"  undefined: kubelet.New\n", "- oldest: v1 (cpu memory), beside v2 (hugetlb)\n", "- `TestC`\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("not there: %s\n%s", want, text)
		}
	}
}

// A row that changed in the list is not in the table, and a result without a row is reported.
func TestVersions_AChangedRowIsRunAgain(t *testing.T) {
	said, err := answers(asked)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, r *result) {
		t.Helper()
		b, err := json.Marshal(r)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "results"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tests.txt"), []byte("# a comment\nsome TestA\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	was := row{"oldest", "1.34", "1.7", "crun", "machine", "some"}
	ran := &result{Row: was, Commit: "0123456789ab", Seen: said, Tests: map[string]outcome{"TestA": {Result: "pass"}}}
	write("results/oldest.json", ran)
	if all, err := results(dir, []row{was}); err != nil || len(all) != 1 {
		t.Fatalf("%v %v", all, err)
	}
	for what, list := range map[string][]row{
		"run it again":                 {{"oldest", "1.34", "1.7", "crun", "machine", "all"}},
		"that the list does not have:": {},
	} {
		if _, err := results(dir, list); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %q", err, what)
		}
	}
	// A row without a result is in the table, as never run.
	all, err := results(dir, []row{was, {"newest", "1.37", "2.4", "runc", "machine", "some"}})
	if err != nil {
		t.Fatal(err)
	}
	if text, err := table(all, func(string) ([]string, error) { return nil, nil }); err != nil ||
		!strings.Contains(text, "| newest | 1.37 | 2.4 | runc | | | some | never run | | |  |  |\n") ||
		!strings.Contains(text, "- newest (Kubernetes 1.37, containerd 2.4, runc, machine) was never run:") {
		t.Errorf("%v\n%s", err, text)
	}
}
