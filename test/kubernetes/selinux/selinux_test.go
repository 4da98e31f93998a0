//go:build kubernetes

// Package selinux_test runs pods with SELinux levels under a real kubelet and containerd, in a
// guest of test/vm: see guest.sh.
package selinux_test

import (
	"context"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// level matches the level that the container runtime chooses for a pod that names none.
var level = regexp.MustCompile(`s0:c[0-9]+,c[0-9]+`)

// S01, S02: a kubelet and a container runtime on a node whose kernel enforces SELinux. A pod's
// label comes with the mount. The kernel denies a volume to a pod of another level. If no label is
// requested, the runtime's label stays.
func TestS01_S02_AKubeletOnANodeThatEnforcesSELinux(t *testing.T) {
	const (
		project, vm = "../../..", ".cache/vm/vm"
		a, b        = "s0:c10,c20", "s0:c3,c4"
		image       = "system_u:object_r:svirt_image_t:"
		process     = "system_u:system_r:svirt_t:"
	)
	ctx, cancel := context.WithTimeout(context.Background(), 55*time.Minute)
	defer cancel()
	run := func(argv ...string) string {
		t.Helper()
		c := exec.CommandContext(ctx, argv[0], argv[1:]...)
		c.Dir = project
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
		return string(out)
	}
	run("test/kubernetes/selinux/prepare.sh")
	out := run(vm, "run", "-kernel", "6.12", "-memory", "5G", "-cpus", "2", vm, "exec", "/bin/bash", "test/kubernetes/selinux/guest.sh")
	t.Logf("%s", out)
	seen := map[string]string{}
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			seen[name] = value
		}
	}
	is := func(name, want string) {
		t.Helper()
		if seen[name] != want {
			t.Errorf("%s is %q, want %q", name, seen[name], want)
		}
	}
	has := func(name string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(seen[name], w) {
				t.Errorf("%s is %q, without %q", name, seen[name], w)
			}
		}
	}
	is("enforcing now", "1")
	for pod, at := range map[string]struct{ level, lines string }{"owner": {a, "1"}, "next": {b, "3"}, "first": {a, "1"}} {
		is(pod+" process", process+at.level)
		is(pod+" write", at.lines)
		is(pod+" file", image+at.level)
		has(pod+" mount", `context="`+image+at.level+`"`)
		has(pod+" node", `context="`+image+at.level+`"`)
	}
	// Only the level matters: a pod that differs in nothing else may use the owner's file.
	is("same read", "line")
	is("same write", "")
	is("same denials", "0")
	has("other read", "Permission denied")
	has("other write", "ermission denied")
	if n, err := strconv.Atoi(seen["other denials"]); err != nil || n < 2 {
		t.Errorf("the kernel logged %q denials, want one of a read and one of a write", seen["other denials"])
	}
	is("owner has", "line,no,")

	chosen := level.FindString(seen["plain process"])
	for pod, at := range map[string]struct{ level, lines string }{"plain": {chosen, "1"}, "recursive": {a, "2"}} {
		is(pod+" process", process+at.level)
		is(pod+" write", at.lines)
		is(pod+" file", image+at.level)
		has(pod+" mount", "seclabel")
		has(pod+" node", "seclabel")
		if strings.Contains(seen[pod+" node"], "context=") {
			t.Errorf("the volume of %s is mounted with a label: %s", pod, seen[pod+" node"])
		}
	}

	has("second event", "conflicting SELinux labels", a, b)
	has("second warning", a, b)
	has("kubelet metric", `access_mode="RWO"`)
}
