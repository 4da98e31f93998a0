package crust

import (
	"fmt"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// sees gives a container the process namespace of a process of the host, as containerd does.
func (s spec) sees(pid int) spec {
	for _, n := range s["linux"].(map[string]any)["namespaces"].([]any) {
		if n := n.(map[string]any); n["type"] == "pid" {
			n["path"] = fmt.Sprintf("/proc/%d/ns/pid", pid)
		}
	}
	return s
}

// Containers of a pod with shareProcessNamespace see and signal each other's processes, a debugger sees those of one container, and
// another container sees only its own. What a container leaves behind ends with it.
func TestC24_ContainersShareProcesses(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	pause := r.pod(t, "ps", "")
	sh := func(script string) spec { return r.spec(t, "ps", "container", "/bin/busybox", "sh", "-c", script) }
	const list = `for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline; done; `
	target := pause.process.Pid

	one, err := r.start(t, "one", sh(`busybox sleep 1111 & echo $!; busybox sleep 100000`).sees(target))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it tells its child's number", func() bool { return one.text(t) != "" })
	two, err := r.start(t, "two", sh(`(busybox sleep 0.1 &); busybox sleep 1; `+list+`
		cat /proc/[0-9]*/stat | grep ' Z ' || echo none; ls /proc/1/root/
		kill `+strings.TrimSpace(one.text(t))+` && echo killed; (busybox sleep 2222 &); exit 3`).sees(target))
	ok(t, err)
	status, said := two.wait(t), two.text(t)
	if status != 3 || !strings.Contains(said, "sleep 2147483647 ") || !strings.Contains(said, "sleep 1111 ") ||
		!strings.Contains(said, "none\n") || !strings.Contains(said, "killed\n") {
		t.Errorf("%d %q", status, said)
	}
	if strings.Contains(said, "init") {
		t.Errorf("the containers see the guest's files: %q", said)
	}
	if out, status := r.exec(t, "one", "/bin/busybox", "sh", "-c", list); status != 0 || strings.Contains(out, "sleep 2222") ||
		strings.Contains(out, "sleep 1111") || !strings.Contains(out, "sleep 100000") {
		t.Errorf("afterwards: %d %q", status, out)
	}

	own, err := r.start(t, "own", sh(list+`echo up; busybox sleep 3333`))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it looks", func() bool { return strings.Contains(own.text(t), "up\n") })
	if said := own.text(t); strings.Contains(said, "2147483647") || strings.Contains(said, "100000") {
		t.Errorf("a container with processes of its own sees %q", said)
	}
	debug, err := r.start(t, "debug", sh(list).sees(own.process.Pid))
	ok(t, err)
	if status, said := debug.wait(t), debug.text(t); status != 0 || !strings.Contains(said, "sleep 3333") ||
		strings.Contains(said, "2147483647") {
		t.Errorf("a debugger: %d %q", status, said)
	}
	if _, err := r.start(t, "host", sh("true").sees(1)); err == nil || !strings.Contains(err.Error(), "belongs to no container of pod ps") {
		t.Errorf("the host's processes: %v", err)
	}
	for _, c := range []string{"two", "debug", "one"} {
		r.delete(t, c)
	}
	// The namespace is there when none has it, as with a pause container.
	again, err := r.start(t, "again", sh(list).sees(target))
	ok(t, err)
	if status, said := again.wait(t), again.text(t); status != 0 || !strings.Contains(said, "2147483647") {
		t.Errorf("again: %d %q", status, said)
	}
	haveFilesInCommon(t, r)
	r.end(t, pause)
}

// haveFilesInCommon: for the guest, a directory of two containers is one, so a pipe in it is one, as locks and sockets are. Their limits
// are those of a node.
func haveFilesInCommon(t *testing.T, r *podRuntime) {
	t.Helper()
	common := mount("/common", "bind", t.TempDir(), "rbind")
	sh := func(script string) spec {
		return r.spec(t, "ps", "container", "/bin/busybox", "sh", "-c", script).add(common)
	}
	reads, err := r.start(t, "reads", sh(`ulimit -n; ulimit -u; busybox mkfifo /common/pipe; echo up; busybox cat /common/pipe`))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it has made the pipe", func() bool { return strings.Contains(reads.text(t), "up\n") })
	writes, err := r.start(t, "writes", sh(`echo through the pipe > /common/pipe`))
	ok(t, err)
	eventually(t, testcrust.Longest(), "the pipe is one", func() bool { return strings.Contains(reads.text(t), "through the pipe\n") })
	if status := writes.wait(t) + reads.wait(t); status != 0 {
		t.Errorf("status %d", status)
	}
	if said := reads.text(t); !strings.HasPrefix(said, "1048576\nunlimited\n") {
		t.Errorf("its limits: %q", said)
	}
	r.delete(t, "writes")
	r.delete(t, "reads")
}
