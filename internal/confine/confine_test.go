package confine

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// device makes a block device of a file, and gives its name.
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

// shell runs a script as a program that checks a file system is run.
func shell(t *testing.T, l Limits, script string) string {
	t.Helper()
	// The limits come when it has begun.
	script = "for i in $(seq 5000); do [ $(cat /proc/self/oom_score_adj) = 1000 ] && break; done; " + script
	cmd := exec.Command("sh", "-c", script, "sh", Inside(l.Device))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := Run(cmd, l, func() {})
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("it did not run: %v", err)
	}
	return out.String()
}

func TestLeast_AProgramHasItsDevice(t *testing.T) {
	dev := device(t)
	if got := shell(t, Limits{Device: dev}, `head -c 6 "$1"; printf XXXX | dd of="$1" conv=notrunc status=none && head -c 6 "$1"`); got != "tenantXXXXnt" {
		t.Errorf("its device reads and writes: %q", got)
	}
}

// What it may not: each line is a way out, and what it prints if it is barred.
func TestLeast_AProgramHasNothingElse(t *testing.T) {
	mine, other := device(t), device(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s3cret"), 0o644); err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	for name, c := range map[string]struct{ script, want string }{
		"another device":        {"cat " + other + " >/dev/null 2>&1 || echo barred", "barred"},
		"a node of one":         {"mknod /dev/x b 7 0 2>/dev/null || echo barred", "barred"},
		"files of this machine": {"cat " + secret + " 2>/dev/null || echo barred", "barred"},
		"passwords":             {"cat /etc/shadow 2>/dev/null || echo barred", "barred"},
		"the root directory":    {"echo /*", "/bin /dev /etc /lib /lib32 /lib64 /libx32 /proc /program /sbin /sys /usr"},
		"a file of its own":     {"for d in / /etc /dev /usr /sys /program; do touch $d/x 2>/dev/null && echo $d; done; echo barred", "barred"},
		"the network":           {fmt.Sprintf("bash -c 'echo x >/dev/tcp/127.0.0.1/%d' 2>/dev/null || echo barred", port), "barred"},
		"interfaces":            {"grep -cE '(eth|ens|enp).*:' /proc/self/net/dev || true", "0"},
		"other processes":       {fmt.Sprintf("ls /proc/%d/ >/dev/null 2>&1 || echo barred", os.Getpid()), "barred"},
		"signals to them":       {fmt.Sprintf("kill -0 %d 2>/dev/null || echo barred", os.Getpid()), "barred"},
		"mounting":              {"mount -t tmpfs x /usr 2>/dev/null || echo barred", "barred"},
		"a user namespace":      {"unshare -U true 2>/dev/null || echo barred", "barred"},
		"a chroot":              {"chroot / true 2>/dev/null || echo barred", "barred"},
		"another loop file":     {"losetup -d " + mine + " 2>/dev/null || echo barred", "barred"},
		"capabilities":          {"grep -E 'Cap(Prm|Eff|Inh|Amb)' /proc/self/status | grep -vc 0000000000000000 || true", "0"},
		"new privileges":        {"grep NoNewPrivs /proc/self/status", "NoNewPrivs:\t1"},
		"system calls":          {"grep Seccomp: /proc/self/status", "Seccomp:\t2"},
		"memory":                {"dd if=/dev/zero of=/dev/null bs=9G count=1 2>/dev/null || echo barred", "barred"},
		"mercy":                 {"cat /proc/self/oom_score_adj", "1000"},
		"the environment":       {"env | grep -cE '^(HOME|USER|GOPATH|PWD_|CRUST)' || true", "0"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, l := range []Limits{{Device: mine}, {Device: mine, Capabilities: []int{21}}} {
				got := strings.TrimSpace(shell(t, l, c.script))
				if name == "the root directory" {
					for _, dir := range strings.Fields(got) {
						if !strings.Contains(c.want+" ", dir+" ") {
							t.Errorf("it sees %s", dir)
						}
					}
					continue
				}
				if name == "capabilities" && l.Capabilities != nil {
					continue
				}
				if got != c.want {
					t.Errorf("with %v: %q, not %q", l.Capabilities, got, c.want)
				}
			}
		})
	}
}

// Whoever starts a program stays as free as before.
func TestLeast_TheStarterIsNotConfined(t *testing.T) {
	dev := device(t)
	for range 20 {
		shell(t, Limits{Device: dev}, "true")
	}
	for _, entry := range []string{"ns/mnt", "ns/net", "ns/pid_for_children"} {
		mine, err := os.Readlink("/proc/self/" + entry) // the first thread's
		if err != nil {
			t.Fatal(err)
		}
		// A child's are those of whatever thread starts it.
		for range 50 {
			out, err := exec.Command("sh", "-c", "readlink /proc/self/"+entry+"; grep Seccomp: /proc/self/status").CombinedOutput()
			if err != nil || string(out) != mine+"\nSeccomp:\t0\n" {
				t.Fatalf("a program of its own has %q, not %q: %v", out, mine, err)
			}
		}
	}
}
