//go:build kubernetes

// Package selinux_test runs pods with SELinux levels under a real kubelet and
// containerd, in a guest of test/vm: see guest.sh.
package selinux_test

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// S01: the kubelet makes context= of a pod's seLinuxOptions, and the volume is
// mounted with it; the next pod's level is another, and no file is touched for it.
func TestS01_AKubeletOnANodeWithSELinux(t *testing.T) {
	const project, vm = "../../..", ".cache/vm/vm"
	ctx, cancel := context.WithTimeout(context.Background(), 35*time.Minute)
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
	seen := map[string][]string{}
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			seen[name] = append(seen[name], value)
		}
	}
	for i, level := range []string{"s0:c10,c20", "s0:c3,c4"} {
		label := "svirt_image_t:" + level
		for name, want := range map[string]string{
			"process": "svirt_t:" + level, "pod": `context="system_u:object_r:` + label + `"`, "node": `context="system_u:object_r:` + label + `"`, "file": label + " ",
			"lines": []string{"1", "2"}[i],
		} {
			if len(seen[name]) != 2 || !strings.Contains(seen[name][i], want) {
				t.Errorf("%s is %q, want %s", name, seen[name], want)
			}
		}
	}
	t.Logf("%s", out)
}
