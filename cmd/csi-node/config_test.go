package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const header = "apiVersion: csi.crust.dev/v1alpha1\nkind: NodeConfig\n"

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// An error in the configuration ends the process before it touches anything, with a clear message.
func TestAConfigurationThatCannotBeUsedEndsTheProcess(t *testing.T) {
	pool := "--pool=a=loop:" + t.TempDir()
	state := filepath.Join(t.TempDir(), "state")
	broken, pools := file(t, header+"pool: []"), file(t, header+"pools: [{name: a, path: /a}]")
	nodes := file(t, header+"nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: []}]")
	for words, args := range map[string][]string{
		broken + ": the key pool is not known":                 {"--config", broken, pool},
		"no such file":                                         {"--config", broken + "x", pool},
		"it says pools, and the command line --pool":           {"--config", pools, pool},
		"--node-labels: without --config":                      {"--node-labels", broken, pool},
		"give at least one --pool NAME=loop:DIR":               {},
		"it says logging.verbosity, and the command line -v":   {"--config", file(t, header+"logging: {verbosity: 2}"), pool, "-v=2"},
		"the file is empty; it begins with apiVersion":         {"--config", file(t, ""), pool},
		`"a" is no absolute path or pattern`:                   {"--allow-device", "a"},
		"nodes are chosen by their labels: give --node-labels": {"--config", nodes},
		"unexpected argument":                                  {pool, "more"},
	} {
		err := run(append([]string{"--capabilities=all", "--state-dir", state}, args...))
		if err == nil || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v; want %s", args, err, words)
		}
	}
	if _, err := os.Stat(state); err == nil {
		t.Error("the state directory was made")
	}
}

func TestTheConfigurationIsCheckedWithoutAStart(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	for text, good := range map[string]bool{
		header + "pools: [{name: a, path: /none}]": true, header + "pools: [{name: a, path: none}]": false,
	} {
		if err := run([]string{"--check-config", "--state-dir", state, "--config", file(t, text)}); (err == nil) != good {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := os.Stat(state); err == nil {
		t.Error("the state directory was made")
	}
}

// csi-node does not talk to the API server, and links no client for it.
func TestA09_NoClientOfTheAPIServer(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "internal/nodeconfig\n") {
		t.Fatalf("these are not the packages of csi-node: %s", out)
	}
	for p := range strings.Lines(string(out)) {
		if strings.HasPrefix(p, "k8s.io/client-go") || strings.HasPrefix(p, "k8s.io/api/") {
			t.Errorf("csi-node has the package %s", p)
		}
	}
}
