package testnode

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// LogBuffer collects a process's output, and can be read meanwhile.
type LogBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *LogBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *LogBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// LaunchCommand builds a command of cmd and starts it. env is added to the test's environment, and
// log receives the output. The caller ends the process.
func LaunchCommand(t testing.TB, name, tags string, env []string, log *LogBuffer, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(BuildCommand(t, name, tags), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// Ended returns a channel that is closed when a process has ended. /proc/PID/stat cannot show this:
// while another thread than the first is in execve(2), the first is a zombie.
func Ended(t testing.TB, pid int) <-chan struct{} {
	t.Helper()
	end, err := linux.ProcessEnd(pid)
	if err != nil {
		t.Fatal(err)
	}
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer end.Close()
		if linux.WaitEnd(t.Context(), end) {
			close(ended)
		}
	}()
	t.Cleanup(func() { <-done })
	return ended
}

// Listens waits until a process accepts connections at a socket. gRPC waits a second before it
// retries, so it must not connect too early.
func Listens(socket string, most time.Duration) {
	for deadline := time.Now().Add(most); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if c, err := net.Dial("unix", socket); err == nil {
			c.Close()
			return
		}
	}
}
