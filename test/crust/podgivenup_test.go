package crust

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// C24: the end of a container is told, whatever its pod's other processes do.
func TestC24_NothingHidesTheEndOfAContainer(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	pause := r.pod(t, "ends", "")
	sh := func(script string) spec { return r.spec(t, "ends", "container", "/bin/busybox", "sh", "-c", script) }
	run := func(id string, c spec) *container {
		t.Helper()
		started, err := r.start(t, id, c)
		ok(t, err)
		eventually(t, testcrust.Longest(), id+" runs", func() bool { return strings.HasSuffix(started.text(t), "\n") })
		return started
	}

	// The stub of a command is killed while the guest's runc makes its process, as by the timeout of an exec probe.
	one := run("one", sh("trap 'exit 7' TERM; echo up; while :; do busybox sleep 0.1; done"))
	begun := time.Now()
	if out, status := r.exec(t, "one", "/bin/busybox", "true"); status != 0 {
		t.Fatal(status, out)
	}
	took := time.Since(begun)
	const moments = 8
	for i := range moments {
		c, err := r.tryExec(t, "one", "/bin/busybox", "sleep", "1")
		ok(t, err)
		time.Sleep(took * time.Duration(i) / moments)
		ok(t, c.process.Kill())
		c.wait(t)
	}
	ok(t, r.call(nil, nil, nil, "kill", "one", "15"))
	if status := one.wait(t); status != 7 {
		t.Errorf("after commands that were given up: %d", status)
	}
	r.delete(t, "one")

	// With shareProcessNamespace, another container opens the first one's output, as a sidecar that forwards logs does.
	target := pause.process.Pid
	said := run("said", sh("echo $$; while ! test -e /tmp/go; do busybox sleep 0.2; done; exit 7").sees(target))
	output := "/proc/" + strings.TrimSpace(said.text(t)) + "/fd/1"
	other := run("other", sh("exec 3>"+output+"; echo hello >&3; echo up; busybox sleep 100000").sees(target))
	if out, status := r.exec(t, "said", "/bin/busybox", "touch", "/tmp/go"); status != 0 {
		t.Fatal(status, out)
	}
	if status := said.wait(t); status != 7 || !strings.HasSuffix(said.text(t), "hello\n") {
		t.Errorf("with its output open elsewhere: %d %q", status, said.text(t))
	}
	if err := other.process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the other container: %v", err)
	}
	r.end(t, pause)
}
