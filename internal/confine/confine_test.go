package confine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// device makes a loop device over a file, and returns its path.
func device(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, bytes.Repeat([]byte("tenant\n\n"), 1<<17), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "-f", "--show", file).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, out)
	}
	name := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "-d", name).CombinedOutput(); err != nil {
			t.Errorf("losetup -d: %v: %s", err, out)
		}
	})
	return name
}

// shell runs a script the way programs that check file systems run.
func shell(t *testing.T, l Limits, script string) string {
	t.Helper()
	// The limits are set after the start.
	script = "i=0; until [ $(ulimit -v) != unlimited ] || [ $i = 10000 ]; do i=$((i+1)); done; " + script
	cmd := exec.Command("sh", "-c", script, "sh", Inside(l.Device))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := Run(cmd, l, func() {})
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("it did not run: %v", err)
	}
	return strings.TrimSpace(out.String())
}

func TestLeast_AProgramHasItsDeviceAndItsCopy(t *testing.T) {
	dev := device(t)
	f, err := os.CreateTemp(t.TempDir(), "copy")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := shell(t, Limits{Device: dev, Copy: f},
		`head -c 6 "$1"; printf XXXX | dd of="$1" conv=notrunc status=none && head -c 6 "$1"; echo copied >`+CopyPath)
	if got != "tenantXXXXnt" {
		t.Errorf("its device reads and writes: %q", got)
	}
	b := make([]byte, 7)
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != "copied\n" {
		t.Errorf("its copy has %q: %v", b, err)
	}
}

// Each script tries a way out, and ends with "barred" if it is barred.
func TestLeast_AProgramHasNothingElse(t *testing.T) {
	mine, other := device(t), device(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s3cret"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tool := range []string{"mknod", "mount", "unshare", "chroot", "losetup", "fsfreeze"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range map[string]string{
		"another device":        "cat " + other + " >/dev/null 2>&1 || echo barred",
		"a node of one":         "mknod /dev/x b 7 0 2>/dev/null || echo barred",
		"files of this machine": "cat " + secret + " 2>/dev/null || echo barred",
		"passwords":             "cat /etc/shadow 2>/dev/null || echo barred",
		"other directories":     `for d in /*; do case $d in /bin|/copy|/dev|/etc|/lib|/lib32|/lib64|/libx32|/proc|/program|/sbin|/sys|/usr) ;; *) echo $d;; esac; done; echo barred`,
		"a file of its own":     "for d in / /etc /dev /usr /sys /proc /program; do touch $d/x 2>/dev/null && echo $d; done; echo barred",
		"the configuration":     "for f in /etc/*; do [ $f = /etc/mtab ] || { (true >>$f) 2>/dev/null && echo $f; }; done; echo barred",
		"processes":             "ls /proc | grep -v -e mounts -e self; ls /proc/self | grep -v mounts; kill -s 0 -- -1 2>/dev/null && echo others; echo barred",
		"mounting":              "mount -t tmpfs x /usr 2>/dev/null || echo barred",
		"a user namespace":      "unshare -U true 2>/dev/null || echo barred",
		"a chroot":              "chroot / true 2>/dev/null || echo barred",
		"its loop device":       "losetup -d " + mine + " 2>/dev/null || echo barred",
		"freezing":              "fsfreeze -u /usr 2>&1 | grep -q 'not permitted' && echo barred",
		"memory":                fmt.Sprintf("[ $(ulimit -v) = %d ] && echo barred", Memory>>10),
		"the environment":       "env | grep -E '^(HOME|USER|GOPATH|CRUST)'; echo barred",
	} {
		t.Run(name, func(t *testing.T) {
			if got := shell(t, Limits{Device: mine}, script); got != "barred" {
				t.Errorf("%q", got)
			}
		})
	}
}

// What /proc shows of such a program from outside.
func TestLeast_WhatAProgramIs(t *testing.T) {
	cmd := exec.Command("sleep", "3600")
	begun, ended := make(chan int, 1), make(chan error, 1)
	go func() { ended <- Run(cmd, Limits{}, func() { begun <- cmd.Process.Pid }) }()
	pid := <-begun
	of := fmt.Sprintf("/proc/%d/", pid)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if b, err := os.ReadFile(of + "oom_score_adj"); err == nil && string(b) == "1000\n" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it is not the first to be ended when memory is short")
		}
	}
	status, err := os.ReadFile(of + "status")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000",
		"CapAmb:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), line+"\n") {
			t.Errorf("its status does not say %q:\n%s", line, status)
		}
	}
	for _, ns := range []string{"mnt", "net", "ipc", "uts", "pid"} {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		if its, err := os.Readlink(of + "ns/" + ns); err != nil || its == mine {
			t.Errorf("its %s namespace is this process's: %v", ns, err)
		}
	}
	links, err := os.ReadFile(of + "net/dev")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(links)) {
		if name, _, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) != "lo" {
			t.Errorf("it has the interface %s", name)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	<-ended
}

// The caller that starts a program is not confined.
func TestLeast_TheStarterIsNotConfined(t *testing.T) {
	dev := device(t)
	for range 20 {
		shell(t, Limits{Device: dev}, "true")
	}
	const entries = "ns/mnt ns/net ns/pid_for_children"
	mine := ""
	for _, entry := range strings.Fields(entries) {
		link, err := os.Readlink("/proc/self/" + entry) // the first thread's
		if err != nil {
			t.Fatal(err)
		}
		mine += link + "\n"
	}
	// A child inherits them from whichever thread starts it.
	for range 50 {
		out, err := exec.Command("sh", "-c", "cd /proc/self && readlink "+entries+" && grep Seccomp: status").CombinedOutput()
		if err != nil || string(out) != mine+"Seccomp:\t0\n" {
			t.Fatalf("a program of its own has %q, not %q: %v", out, mine, err)
		}
	}
}

// A child that is being started briefly has copies of this process's descriptors. A file made by
// open(2) stays open for that long, and its mount cannot be made read-only.
func TestA12_ManyProgramsBesideEachOther(t *testing.T) {
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 100 {
				if err := Run(exec.Command("true"), Limits{}, func() {}); err != nil {
					t.Errorf("it did not run: %v", err)
					return
				}
			}
		})
	}
	all.Wait()
}
