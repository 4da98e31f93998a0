package crust

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// upgraded does something while another version of crust-oci has its name. That version's configuration makes it unable to do anything
// for a container by itself: its runtime is /bin/false.
func (r *podRuntime) upgraded(t testing.TB, during func()) {
	t.Helper()
	config := filepath.Join(r.dir, "oci.json")
	before, err := os.ReadFile(config)
	ok(t, err)
	var next map[string]any
	ok(t, json.Unmarshal(before, &next))
	next["runtime"] = "/bin/false"
	b, err := json.Marshal(next)
	ok(t, err)
	old, err := os.Readlink(r.bin)
	ok(t, err)
	program, err := os.ReadFile(old)
	ok(t, err)
	other := filepath.Join(r.dir, "next")
	ok(t, os.WriteFile(other, append(program, "next"...), 0o755))
	link := func(to string) {
		ok(t, os.Remove(r.bin))
		ok(t, os.Symlink(to, r.bin))
	}
	ok(t, os.WriteFile(config, b, 0o600))
	link(other)
	during()
	link(old)
	ok(t, os.WriteFile(config, before, 0o600))
}

// keepsItsProgram shows that a pod that runs goes on after an upgrade: with the program that made it.
func (r *podRuntime) keepsItsProgram(t testing.TB, pod, runs string) {
	t.Helper()
	made, err := os.Readlink(r.bin)
	ok(t, err)
	r.upgraded(t, func() {
		if out, status := r.exec(t, runs, "/bin/busybox", "echo", "after the upgrade"); status != 0 || out != "after the upgrade\n" {
			t.Errorf("a command in a container that ran before: %d %q", status, out)
		}
		late, err := r.start(t, "late", r.spec(t, pod, "container", "/bin/busybox", "sh", "-c",
			"echo up; while :; do busybox sleep 0.1; done"))
		ok(t, err)
		eventually(t, testcrust.Longest(), "a container that comes later runs", func() bool { return strings.Contains(late.text(t), "up") })
		stub, err := os.Stat(fmt.Sprintf("/proc/%d/exe", late.process.Pid))
		ok(t, err)
		if its, err := os.Stat(made); err != nil || !os.SameFile(its, stub) {
			t.Errorf("the stub of a container that comes later is another program: %v", err)
		}
		ok(t, r.call(nil, nil, nil, "kill", "late", "9"))
		late.wait(t)
		r.delete(t, "late")
	})
}
