package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// answers parses the output of ask.sh.
func answers(text string) (seen, error) {
	var s seen
	fields := map[string]*string{"apiServer": &s.APIServer, "kubelet": &s.Kubelet, "containerRuntime": &s.ContainerRuntime, "oci": &s.OCI,
		"kernel": &s.Kernel, "architecture": &s.Architecture, "cgroups": &s.Cgroups, "features": &s.Features, "driver": &s.Driver}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if f := fields[name]; f != nil {
			if *f != "" {
				return s, fmt.Errorf("%s is %q and %q", name, *f, value)
			}
			*f = value
		}
	}
	for name, f := range fields {
		if *f == "" && name != "features" { // an older kubelet or runtime has none
			return s, fmt.Errorf("nothing answered %s: %s", name, text)
		}
	}
	return s, nil
}

// said matches a line that a test itself printed: T.Log and similar methods prefix it with the
// file.
var said = regexp.MustCompile(`^\s*[a-z_]+_test\.go:\d+: (.*)`)

// unsupported begins what a test logs that saw a pod refused, because the runtime lacks what the pod asks for.
const unsupported = "not supported: "

// outcomes reads the events of test2json. A test with subtests counts as its subtests.
func outcomes(events []byte) (map[string]outcome, error) {
	all, words := map[string]outcome{}, map[string][]string{}
	for d := json.NewDecoder(bytes.NewReader(events)); ; {
		var e struct{ Action, Test, Output string }
		if err := d.Decode(&e); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		if e.Test == "" {
			continue
		}
		switch e.Action {
		case "run":
			all[e.Test] = outcome{Result: "fail", Words: "it did not end"}
		case "output":
			if m := said.FindStringSubmatch(e.Output); m != nil {
				words[e.Test] = append(words[e.Test], strings.TrimSpace(m[1]))
			}
		case "pass":
			all[e.Test] = outcome{Result: "pass"}
			for _, w := range words[e.Test] {
				if why, refused := strings.CutPrefix(w, unsupported); refused {
					all[e.Test] = outcome{Result: "refused", Words: why}
				}
			}
		case "fail", "skip": // what is skipped shows nothing
			w := words[e.Test]
			if len(w) == 0 {
				w = []string{"no words; see the log"}
			}
			// The first line is the reason: a failed test also logs what it saved.
			all[e.Test] = outcome{Result: "fail", Words: w[0]}
		}
	}
	parts := func(name string, result string) bool {
		for other, o := range all {
			if strings.HasPrefix(other, name+"/") && (result == "" || o.Result == result) {
				return true
			}
		}
		return false
	}
	whole := maps.Clone(all)
	maps.DeleteFunc(whole, func(name string, o outcome) bool {
		// A failure outside the subtests counts by itself.
		return parts(name, "") && (o.Result != "fail" || parts(name, "fail"))
	})
	return whole, nil
}

// programs builds what a row needs and fills a directory with all programs of its node. Programs
// without a version of their own come from the ordinary cluster.
func programs(r row, dir string) (string, error) {
	ordinary, err := filepath.Abs(filepath.Join(cache, "bin"))
	if err != nil {
		return "", err
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	from := []string{ordinary}
	for _, part := range []string{"kube-" + r.Kubernetes, "containerd-" + r.Containerd, r.OCI} {
		if _, err := os.Stat(filepath.Join(here, "modules", part+".mod")); err != nil {
			continue // the ordinary one; the end of the run compares its version
		}
		if _, err := output("bash", here+"/build.sh", part); err != nil {
			return "", err
		}
		from = append(from, filepath.Join(filepath.Dir(ordinary), "parts", part))
	}
	for _, d := range from {
		files, err := filepath.Glob(d + "/*")
		if err != nil {
			return "", err
		}
		for _, f := range files {
			to := filepath.Join(dir, filepath.Base(f))
			if err := os.Remove(to); err != nil && !os.IsNotExist(err) {
				return "", err
			}
			if err := os.Symlink(f, to); err != nil {
				return "", err
			}
		}
	}
	return dir, nil
}
