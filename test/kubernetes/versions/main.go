// Command versions tests the driver with other versions of Kubernetes, containerd and OCI runtimes,
// and writes the results to docs/versions.md: `make test-versions`. It needs root and an hour.
//
//	versions               runs every row of the file list, then writes the table
//	versions -only REGEX   runs these rows
//	versions -write        runs none
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Directories, relative to the project's, in which the command starts.
const (
	here  = "test/kubernetes/versions"
	cache = ".cache/kubernetes"
	doc   = "docs/versions.md"
)

func main() {
	only := flag.String("only", "", "the names of rows")
	write := flag.Bool("write", false, "only write the table")
	flag.Parse()
	if err := run(*only, *write); err != nil {
		fmt.Fprintln(os.Stderr, "versions:", err)
		os.Exit(1)
	}
}

func run(only string, write bool) error {
	which, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	all, err := rows(here)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range all {
		if write || !which.MatchString(r.Name) {
			continue
		}
		fmt.Printf("=== %s: Kubernetes %s, containerd %s, %s, %s\n", r.Name, r.Kubernetes, r.Containerd, r.OCI, r.Place)
		begin := time.Now()
		got, err := one(r)
		if err != nil {
			return fmt.Errorf("%s: %w", r.Name, err)
		}
		fmt.Printf("=== %s: %d passed, %d failed, %d not supported, after %.0f s; %s\n", r.Name, got.count("pass"), got.count("fail"),
			got.count("refused"), time.Since(begin).Seconds(), got.Error)
		if n := got.count("fail"); n > 0 {
			errs = append(errs, fmt.Errorf("%s: %d tests failed; %s/versions/%s/log", r.Name, n, cache, r.Name))
		}
		b, err := json.MarshalIndent(got, "", "\t")
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(here, "results"), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(here, "results", r.Name+".json"), append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	got, err := results(here, all)
	errs = append(errs, err)
	text, err := table(got, func(set string) ([]string, error) { return tests(here, set) })
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, os.WriteFile(doc, []byte(text), 0o644))...)
}

// output returns what a program printed. The error contains the end of it.
func output(name string, argv ...string) (string, error) {
	b, err := exec.Command(name, argv...).CombinedOutput()
	text := strings.TrimSpace(string(b))
	if err != nil {
		return text, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(argv, " "), err, last(text, 12))
	}
	return text, nil
}

func last(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// one runs a row. The result's Error says what did not build or start; err is this machine's.
func one(r row) (result, error) {
	got := result{Row: r, Date: time.Now().UTC().Format(time.DateOnly)}
	var err error
	if got.Commit, err = output("git", "rev-parse", "--short=12", "HEAD"); err != nil {
		return got, err
	}
	changed, err := output("git", "status", "--porcelain", "--", ".", ":!"+doc, ":!"+here+"/results")
	if err != nil {
		return got, err
	}
	if changed != "" {
		got.Commit += "-dirty"
	}
	dir, err := filepath.Abs(filepath.Join(cache, "versions", r.Name))
	if err != nil {
		return got, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return got, err
	}
	bin, err := programs(r, filepath.Join(dir, "bin"))
	if err != nil {
		got.Error = err.Error()
		return got, nil
	}
	if _, err := output("go", "test", "-c", "-tags", "kubernetes", "-o", dir+"/kubernetes.test", "./test/kubernetes"); err != nil {
		return got, err
	}
	names, err := tests(here, r.Tests)
	if err != nil {
		return got, err
	}
	state := filepath.Join(dir, "node")
	argv := []string{"bash", here + "/row.sh", "^(" + strings.Join(names, "|") + ")$"}
	env := []string{"CRUST_VERSIONS_TESTS=" + dir + "/kubernetes.test", "CRUST_KUBERNETES_BIN=" + bin,
		"CRUST_KUBERNETES_OCI=" + strings.Split(r.OCI, "-")[0]}
	if kernel, guest := strings.CutPrefix(r.Place, "guest-"); guest {
		if _, err := output("bash", here+"/guest.sh"); err != nil {
			return got, err
		}
		state = "/var/lib/node"
		files := filepath.Join(filepath.Dir(dir), "guest")
		env = append(env, "CRUST_VERSIONS_GUEST="+files, "CRUST_KUBERNETES_IMAGES="+files+"/images", "CRUST_KUBERNETES_PATIENCE=8",
			"CRUST_VERSIONS_PARALLEL=2")
		argv = append([]string{".cache/vm/vm", "run", "-kernel", kernel, "-memory", "5G", "-cpus", "2",
			".cache/vm/vm", "exec", "/bin/bash"}, argv[1:]...)
	}
	c := exec.Command(argv[0], argv[1:]...)
	c.Env = append(os.Environ(), append(env, "CRUST_KUBERNETES_STATE="+state)...)
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return got, err
	}
	defer log.Close()
	var words bytes.Buffer
	c.Stdout = io.MultiWriter(log, &words)
	c.Stderr = c.Stdout
	ended := c.Run()
	if err := got.read(words.String()); err != nil {
		return got, err
	}
	if len(got.Tests) == 0 {
		got.Error = fmt.Sprintf("%v\n%s", ended, last(strings.Split(words.String(), "ASKED\n")[0], 12))
	}
	return got, nil
}

// read parses the output of row.sh.
func (r *result) read(words string) error {
	ran, asked, _ := strings.Cut(words, "ASKED\n")
	c := exec.Command("go", "tool", "test2json")
	c.Stdin = strings.NewReader(ran)
	events, err := c.Output()
	if err != nil {
		return fmt.Errorf("test2json: %w", err)
	}
	if r.Tests, err = outcomes(events); err != nil {
		return err
	}
	if r.Seen, err = answers(asked); err != nil && len(r.Tests) > 0 {
		return err
	}
	return nil
}
