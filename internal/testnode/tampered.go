package testnode

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Tampered makes strace change the kernel's answers to the running csi-node, until end is called: fault is what strace(1) injects
// into a system call.
func (n *Node) Tampered(call, fault string) (end func()) {
	n.T.Helper()
	trace := exec.Command("strace", "-f", "-q", "-o", filepath.Join(n.Dir, "trace"), "-e", "trace="+call, "-e", "inject="+call+":"+fault,
		"-p", fmt.Sprint(n.PID()))
	if err := trace.Start(); err != nil {
		n.T.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		if err := trace.Process.Signal(syscall.SIGTERM); err != nil {
			n.T.Error(err)
		}
		_ = trace.Wait() // "signal: terminated"
	})
	n.T.Cleanup(end) // before the node is stopped
	n.Traced()
	return end
}

// Traced waits until each thread of csi-node is traced: strace attaches to one after the other, and a call runs on any of them.
func (n *Node) Traced() {
	n.T.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", n.PID()))
		left := len(threads) == 0
		for _, thread := range threads {
			status, err := os.ReadFile(thread)
			left = left || err == nil && strings.Contains(string(status), "TracerPid:\t0\n") // or it has ended
		}
		if err == nil && !left {
			return
		}
		if time.Now().After(deadline) {
			n.T.Fatalf("strace does not attach to csi-node: %v", err)
		}
	}
}
