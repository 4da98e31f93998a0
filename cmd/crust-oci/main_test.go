package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
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

func TestLastWordsAreWhereContainerdLooks(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log.json")
	for _, args := range []string{"--root /r --log " + file + " --log-format json create --bundle /b id",
		"--log=" + file + " --log-format=json run id", "create id", "exec id program --log=" + file} {
		if err := logTo(strings.Fields(args), errors.New("the volume is elsewhere")); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	for _, line := range lines {
		var said struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(line), &said); err != nil || said.Level != "error" ||
			!strings.Contains(said.Msg, "the volume is elsewhere") {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// Whatever stands before and after the command, "create" and its bundle are found, or the arguments
// are refused: no created container bypasses the check.
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
		if slices.ContainsFunc(words, func(w string) bool { return !strings.HasPrefix(w, "-") }) ||
			len(words) > 0 && takesValue(words[len(words)-1]) {
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

// C19: containerd's shim takes a failed deletion for a success if the error has certain words, whoever they are of.
func TestC19_NoFailedDeletionLooksLikeSuccess(t *testing.T) {
	err := errors.New("the guest says: container x does not exist")
	if got := (notDeleted{err}); strings.Contains(got.Error(), "does not exist") || !errors.Is(got, err) {
		t.Errorf("%v", got)
	}
}

// What follows the configuration may be what its author meant.
func TestB10_AConfigurationIsOneDocument(t *testing.T) {
	file := filepath.Join(t.TempDir(), "oci.json")
	t.Setenv(configVariable, file)
	t.Setenv("CRUST_OCI_RUNTIME", "true")
	for text, fine := range map[string]bool{
		`{}`: true, "{\"runtime\": \"crun\"}\n": true, `{}x`: false, `{} {}`: false, `{}}`: false, `{}]`: false, `{"x": 1}`: false,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := load(); (err == nil) != fine {
			t.Errorf("%q: %v", text, err)
		}
	}
}
