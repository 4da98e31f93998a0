package podvm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// A container sees the processes of its pod or of one of its containers, and of nobody else on the host.
func TestC24_WhoseProcessesAContainerSees(t *testing.T) {
	p := &Pod{ID: "pod", dir: t.TempDir()}
	stub := exec.Command("sleep", "1000")
	if err := errors.Join(stub.Start(), os.Mkdir(p.at("containers"), 0o700)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	defer func() { _ = stub.Process.Kill(); <-ended }()
	go func() { ended <- stub.Wait() }()
	var err error
	if p.Pause, err = processOf(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	runs, err := processOf(stub.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	earlier := runs
	earlier.PID = os.Getppid() // another process has its number now
	err = errors.Join(p.noteStub("one", runs), p.noteStub("two", earlier), os.WriteFile(p.at("containers/made"), nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	of := func(pid int) string { return fmt.Sprintf("/proc/%d/ns/pid", pid) }
	for path, want := range map[string]string{
		"": "false  true", of(os.Getpid()): "true  true", of(runs.PID): "false one true",
		of(1): "false  false", of(os.Getppid()): "false  false", "/proc/self/ns/pid": "false  false", "/proc/1/ns/net": "false  false",
		"/run/netns/x": "false  false",
	} {
		all, one, err := p.processesOf(path)
		if got := fmt.Sprint(all, " ", one, " ", err == nil); got != want {
			t.Errorf("%s: %q, %v, not %q", path, got, err, want)
		}
	}
}
