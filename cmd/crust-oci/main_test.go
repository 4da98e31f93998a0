package main

import (
	"slices"
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

// Whatever stands before the command and behind it, "create" and its bundle are
// found, or the arguments are refused: no container that is made passes by.
func FuzzParse(f *testing.F) {
	f.Add("--root /x", "--pid-file p", "id")
	f.Add("--log=l -cgroup-manager cgroupfs", "", "")
	f.Fuzz(func(t *testing.T, global, before, after string) {
		words := strings.Fields(global)
		args := append(append([]string{}, words...), "create", "--bundle", "/the/bundle")
		args = append(append(args, strings.Fields(before)...), strings.Fields(after)...)
		command, bundle, err := parse(args)
		if err != nil {
			return
		}
		other := strings.Contains(before+after, "-b") // another --bundle or -b
		if slices.ContainsFunc(words, func(w string) bool { return !strings.HasPrefix(w, "-") }) || len(words) > 0 && takesValue(words[len(words)-1]) {
			// The command is one of the words before, or "create" is a value.
			if command == "" {
				t.Errorf("%q: no command", args)
			}
			return
		}
		if command != "create" || bundle != "/the/bundle" && !other {
			t.Errorf("%q: %q %q", args, command, bundle)
		}
	})
}

func takesValue(word string) bool {
	return !strings.Contains(word, "=") && slices.Contains(withValue, "--"+strings.TrimLeft(word, "-"))
}
