package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var inside struct {
	sync.Mutex
	built []byte
}

// pod does operations on a node like a pod's process, without any capability; see
// test/node/inside/pod.go. It returns each answer.
func pod(t testing.TB, node string, ops ...string) map[string]string {
	t.Helper()
	out, err := podCommand(t, node, ops...).CombinedOutput()
	if err != nil {
		t.Fatalf("as a pod, %v on %s: %v\n%s", ops, node, err, out)
	}
	answers := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if op, answer, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ": "); ok {
			answers[op] = answer
		}
	}
	return answers
}

func podCommand(t testing.TB, node string, ops ...string) *exec.Cmd {
	t.Helper()
	inside.Lock()
	defer inside.Unlock()
	if inside.built == nil {
		b, err := os.ReadFile(insideProgram(t))
		ok(t, err)
		inside.built = b
	}
	file := filepath.Join(t.TempDir(), "inside")
	syscall.ForkLock.RLock() // a child that inherits it open for writing would make exec fail
	err := os.WriteFile(file, inside.built, 0o755)
	syscall.ForkLock.RUnlock()
	ok(t, err)
	return exec.Command(file, append([]string{"as-pod", node}, ops...)...)
}

// numberOf returns the device number of a node, "7:3".
func numberOf(t testing.TB, node string) string {
	t.Helper()
	var st unix.Stat_t
	ok(t, unix.Stat(node, &st))
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// loopsOf returns the loop devices whose backing file, as the kernel shows it, is the file, or that
// are bound on top of one of those.
func loopsOf(t testing.TB, file string) []string {
	t.Helper()
	var found []string
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	ok(t, err)
	for {
		before := len(found)
		for _, f := range all {
			name := strings.Split(f, "/")[3]
			b, _ := os.ReadFile(f)
			shown := strings.TrimSuffix(strings.TrimSpace(string(b)), " (deleted)")
			mine := shown == file
			for _, lower := range found {
				mine = mine || filepath.Base(shown) == lower
			}
			if mine && !strings.Contains(" "+strings.Join(found, " ")+" ", " "+name+" ") {
				found = append(found, name)
			}
		}
		if len(found) == before {
			return found
		}
	}
}

// gone waits until no loop device refers to the file.
func gone(t testing.TB, file string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := loopsOf(t, file)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("loop devices still refer to %s: %v", file, left)
			return
		}
	}
}

func sizeOf(t testing.TB, node string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "blockdev", "--getsize64", node))
}

func beginning(t testing.TB, node string, n int) string {
	t.Helper()
	return pod(t, node, fmt.Sprint("read=", n))[fmt.Sprint("read=", n)]
}
