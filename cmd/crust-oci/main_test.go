package main

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for line, want := range map[string]string{
		"create --bundle /b id":                             "create /b",
		"--root /run/runc --log=/l create -b /b id":         "create /b",
		"-root /x -log /create create -bundle /b id":        "create /b",
		"--systemd-cgroup run id":                           "run .",
		"run -b=/b id":                                      "run /b",
		"--cgroup-manager=disabled delete --force id":       "delete .",
		"--log-format json --log /run create --bundle=/b i": "create /b",
		"--version":             " .",
		"--unknown value run x": "error",
		"run id -b":             "error",
		"run --bundle= id":      "run .",
	} {
		command, bundle, err := parse(strings.Fields(line))
		got := command + " " + bundle
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

// Whatever the arguments, no container is made that passes by: where they hold
// "run" or "create" as a command, it is found or refused.
func FuzzParse(f *testing.F) {
	f.Add("--root /x run -b /b id")
	f.Fuzz(func(t *testing.T, line string) {
		command, bundle, err := parse(strings.Fields(line))
		if err == nil && command != "" && bundle == "" {
			t.Errorf("%q: no bundle", line)
		}
	})
}
