package crust

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// command is a call of crust-oci, which is killed when ctx ends.
func (r *podRuntime) command(ctx context.Context, args ...string) *exec.Cmd {
	all := append([]string{"--root", filepath.Join(r.dir, "state"), "--log", filepath.Join(r.dir, "log")}, args...)
	c := exec.CommandContext(ctx, r.bin, all...)
	c.Env = append(os.Environ(), "CRUST_OCI_CONFIG="+filepath.Join(r.dir, "oci.json"))
	return c
}

// exec runs a process in a container, with "input" as its input, and returns its output and exit status.
func (r *podRuntime) exec(t testing.TB, id string, args ...string) (string, int) {
	t.Helper()
	c, err := r.tryExec(t, id, args...)
	ok(t, err)
	status := c.wait(t)
	return c.text(t), status
}

// tryExec is exec that may fail.
func (r *podRuntime) tryExec(t testing.TB, id string, args ...string) (*container, error) {
	t.Helper()
	in, err := os.CreateTemp(r.dir, "in-")
	ok(t, err)
	_, err = in.WriteString("input\n")
	ok(t, err)
	_, err = in.Seek(0, 0)
	ok(t, err)
	out, err := os.CreateTemp(r.dir, "out-")
	ok(t, err)
	b, err := json.Marshal(map[string]any{"args": args, "cwd": "/", "env": []string{"PATH=/bin"},
		"user": map[string]any{"uid": 0, "gid": 0}})
	ok(t, err)
	file, pidFile := filepath.Join(r.dir, "process.json"), filepath.Join(r.dir, "exec.pid")
	ok(t, os.WriteFile(file, b, 0o600))
	if err := r.call(in, out, out, "exec", "--process", file, "--detach", "--pid-file", pidFile, id); err != nil {
		return nil, err
	}
	return &container{r: r, id: id, out: out, process: processIn(t, pidFile)}, nil
}

// terminal runs a shell in a container with a terminal of 100 columns and 30 rows, and returns the size that the shell sees.
func (r *podRuntime) terminal(t testing.TB, id string) string {
	t.Helper()
	socket := filepath.Join(r.dir, "console")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	ok(t, err)
	defer l.Close()
	terminals := make(chan *os.File, 1)
	go func() {
		defer close(terminals)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		if f, err := linux.ReceiveFile(c); err == nil {
			terminals <- f
		}
	}()
	b, err := json.Marshal(map[string]any{"args": []string{"/bin/sh"}, "cwd": "/", "terminal": true,
		"user": map[string]any{"uid": 0, "gid": 0}, "env": []string{"PATH=/bin"}})
	ok(t, err)
	file, pidFile := filepath.Join(r.dir, "process.json"), filepath.Join(r.dir, "exec.pid")
	ok(t, os.WriteFile(file, b, 0o600))
	ok(t, r.call(nil, nil, nil, "exec", "--process", file, "--console-socket", socket, "--detach", "--pid-file", pidFile, id))
	terminal := <-terminals
	if terminal == nil {
		t.Fatal("no terminal came")
	}
	defer terminal.Close()
	ok(t, linux.SetWindow(terminal, 100, 30))
	var said strings.Builder
	found := make(chan string, 1)
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := terminal.Read(b)
			said.Write(b[:n])
			if m := regexp.MustCompile(`size is (\d+ \d+)`).FindStringSubmatch(said.String()); m != nil || err != nil {
				found <- append(m, "", said.String())[1]
				return
			}
		}
	}()
	// The size may come later than the shell.
	_, err = terminal.WriteString(`while [ "$(busybox stty size)" = "0 0" ]; do busybox sleep 0.1; done; echo size "is $(busybox stty size)"; exit` + "\n")
	ok(t, err)
	select {
	case size := <-found:
		if status := (&container{r: r, id: id, process: processIn(t, pidFile)}).wait(t); status != 0 {
			t.Errorf("the shell ended with %d", status)
		}
		return size
	case <-time.After(testcrust.Longest()):
		t.Fatal("the shell does not answer")
		return ""
	}
}
