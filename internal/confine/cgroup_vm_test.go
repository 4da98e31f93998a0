//go:build vm

// Tests that need cgroups v2, in test/vm's guests.

package confine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const inCgroup = "CRUST_TEST_IN_CGROUP"

// A program that exceeds its cgroup's memory is killed, and nothing else is. Then its cgroup is
// gone.
func TestLeast_AProgramHasACgroupOfItsOwn(t *testing.T) {
	if os.Getenv(inCgroup) != "" {
		lifeInCgroup(t)
		return
	}
	if err := Cgroups(); err == nil {
		t.Error("a process in the root cgroup has a cgroup beside it")
	}
	if out, err := exec.Command("mount", "-o", "remount,nsdelegate", "/sys/fs/cgroup").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	options := cgroupOptions(t)
	const root = "/sys/fs/cgroup"
	above := filepath.Join(root, "above")
	own := filepath.Join(above, "own")
	for _, dir := range []string{above, own} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
	}
	for _, dir := range []string{root, above} {
		if err := os.WriteFile(dir+"/cgroup.subtree_control", []byte("+memory +pids +cpu"), 0); err != nil {
			t.Fatal(err)
		}
	}
	left := filepath.Join(above, cgroupNames+"left") // by a process that was killed
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(own)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	child := exec.Command(os.Args[0], "-test.run", t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), inCgroup+"="+above)
	child.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if names := programCgroups(t, above); len(names) > 0 {
		t.Errorf("left: %v", names)
	}
	if got := cgroupOptions(t); !strings.Contains(options, "nsdelegate") || got != options {
		t.Errorf("the options of the machine's cgroups were %s, and are %s", options, got)
	}
}

func programCgroups(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, cgroupNames+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// cgroupOptions returns the mount options of the machine's cgroups.
func cgroupOptions(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if _, options, ok := strings.Cut(line, " - cgroup2 "); ok {
			return options
		}
	}
	t.Fatal("there is no cgroup2 mount")
	return ""
}

func lifeInCgroup(t *testing.T) {
	if err := Cgroups(); err != nil {
		t.Fatal(err)
	}
	above := os.Getenv(inCgroup)
	if names := programCgroups(t, above); len(names) > 0 {
		t.Errorf("what others left is there still: %v", names)
	}
	sleeper := exec.Command("sleep", "3600")
	begun, ended := make(chan int, 1), make(chan error, 1)
	go func() { ended <- Run(sleeper, Limits{}, func() { begun <- sleeper.Process.Pid }) }()
	pid := <-begun
	want := ""
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if names := programCgroups(t, above); len(names) == 1 {
			want = names[0]
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err == nil && want != "" && strings.TrimSpace(string(b)) == "0::"+strings.TrimPrefix(want, "/sys/fs/cgroup") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("its cgroup is %s: %v; there is %q", b, err, want)
		}
	}
	for file, value := range map[string]string{"memory.max": fmt.Sprint(Memory + Memory/4), "pids.max": "4096", "cpu.weight": "10"} {
		if b, err := os.ReadFile(filepath.Join(want, file)); err != nil || strings.TrimSpace(string(b)) != value {
			t.Errorf("%s is %s: %v", file, b, err)
		}
	}
	if err := sleeper.Process.Kill(); err != nil {
		t.Error(err)
	}
	<-ended

	// The limits are set after the start; the limit of the address space comes last.
	const limit = 16 << 20
	greedy := fmt.Sprintf("until [ $(ulimit -v) != unlimited ]; do :; done; head -c %d /dev/zero | tail -c %d >/dev/null", 4*limit, 3*limit)
	for _, c := range []struct {
		limit int64
		exit  int
	}{{8 * limit, 0}, {limit, 128 + int(syscall.SIGKILL)}} {
		cgroupLimits[0].value = fmt.Sprint(c.limit)
		program := exec.Command("sh", "-c", greedy)
		err := Run(program, Limits{}, func() {})
		exit := program.ProcessState.ExitCode()
		if status, ok := program.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			exit = 128 + int(status.Signal()) // the kernel killed the shell instead of its child
		}
		if exit != c.exit {
			t.Errorf("with %d bytes it ended with %v", c.limit, err)
		}
	}
	if err := Run(exec.Command("true"), Limits{}, func() {}); err != nil {
		t.Errorf("the next program: %v", err)
	}
}
