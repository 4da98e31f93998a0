// Command guest is PID 1 of a test's microVM. It moves to the root disk, mounts the project's
// directory, loads the SELinux policy, and runs the launcher's programs. See test/vm.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/test/vm/protocol"
)

// slowest is how long a device may take to appear in an emulated guest on a busy machine.
const slowest = 5 * time.Minute

func main() {
	err := boot() // returns only on failure
	fmt.Println("guest:", err)
	time.Sleep(time.Second) // for the console to drain
	os.Exit(1)              // the kernel panics, and QEMU ends
}

func mount(source, target, fstype, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount(source, target, fstype, 0, data); err != nil && !errors.Is(err, syscall.EBUSY) {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	return nil
}

func boot() error {
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"}} {
		if err := mount(m[0], m[1], m[2], ""); err != nil {
			return err
		}
	}
	if console, err := os.OpenFile("/dev/console", os.O_RDWR, 0); err == nil {
		os.Stdout, os.Stderr = console, console
	}
	if err := loadModules(); err != nil {
		return err
	}
	if err := switchRoot("/dev/vda"); err != nil {
		return err
	}
	for _, m := range [][4]string{
		{"run", "/run", "tmpfs", "mode=755"}, {"shm", "/dev/shm", "tmpfs", ""}, {"devpts", "/dev/pts", "devpts", ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", ""},
	} {
		if err := mount(m[0], m[1], m[2], m[3]); err != nil {
			return err
		}
	}
	if err := os.Symlink("/proc/self/fd", "/dev/fd"); err != nil { // bash's <(...)
		return err
	}
	if err := os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"); err != nil {
		return err
	}
	if err := loadPolicy(); err != nil {
		return err
	}
	run("ip", "link", "set", "lo", "up")
	run("hostname", "guest")
	for _, module := range []string{"loop", "virtiofs"} {
		run("modprobe", module)
	}
	if share := cmdline("crust.share"); share != "" {
		if err := mount("share", share, "virtiofs", ""); err != nil {
			return err
		}
	}
	return serve()
}

func run(argv ...string) {
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		fmt.Printf("guest: %v: %v %s\n", argv, err, out)
	}
}

func cmdline(key string) string {
	b, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ""
	}
	for _, word := range strings.Fields(string(b)) {
		if k, v, _ := strings.Cut(word, "="); k == key {
			return v
		}
	}
	return ""
}

func loadModules() error {
	files, err := filepath.Glob("/modules/*")
	sort.Strings(files)
	for _, f := range files {
		if err := linux.LoadModule(f); err != nil {
			return fmt.Errorf("module %s: %w", f, err)
		}
	}
	return err
}

func switchRoot(device string) error {
	for deadline := time.Now().Add(slowest); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(device); err == nil {
			break
		} else if time.Now().After(deadline) {
			return err
		}
	}
	if err := mount(device, "/newroot", "ext4", ""); err != nil {
		return err
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := syscall.Mount(dir, "/newroot"+dir, "", syscall.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if err := os.Chdir("/newroot"); err != nil {
		return err
	}
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return err
	}
	if err := syscall.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}

// loadPolicy loads Debian's policy if the kernel runs with SELinux. The kernel needs it in one
// write.
func loadPolicy() error {
	if _, err := os.Stat("/sys/fs/selinux"); err != nil {
		return nil
	}
	if err := mount("selinuxfs", "/sys/fs/selinux", "selinuxfs", ""); err != nil {
		return err
	}
	files, err := filepath.Glob("/etc/selinux/default/policy/policy.*")
	if err != nil || len(files) != 1 {
		return fmt.Errorf("policy: %v %v", files, err)
	}
	policy, err := os.ReadFile(files[0])
	if err != nil {
		return err
	}
	return os.WriteFile("/sys/fs/selinux/load", policy, 0)
}

func openPort() (*os.File, error) {
	for deadline := time.Now().Add(slowest); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == protocol.Port {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
	}
	return nil, fmt.Errorf("no port %s", protocol.Port)
}

// sender is shared by a program's two outputs.
type sender struct {
	mu  sync.Mutex
	enc *json.Encoder
}

func (s *sender) send(r protocol.Reply) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enc.Encode(r)
}

type writer func([]byte) error

func (w writer) Write(b []byte) (int, error) { return len(b), w(b) }

func serve() error {
	port, err := openPort()
	if err != nil {
		return err
	}
	s := &sender{enc: json.NewEncoder(port)}
	if err := s.send(protocol.Reply{Ready: linux.Uname()}); err != nil {
		return err
	}
	kill := func() {}
	requests := json.NewDecoder(port)
	for {
		var r protocol.Request
		if err := requests.Decode(&r); err != nil {
			return err
		}
		if r.Kill {
			kill()
			continue
		}
		ctx, cancel := context.WithCancel(context.Background())
		kill = cancel
		go func() {
			code := execute(ctx, s, r)
			cancel()
			if err := s.send(protocol.Reply{Exit: &code}); err != nil {
				fmt.Println("guest:", err)
			}
		}()
	}
}

func execute(ctx context.Context, s *sender, r protocol.Request) int {
	c := exec.CommandContext(ctx, r.Argv[0], r.Argv[1:]...)
	c.Dir = r.Dir
	c.Env = append(os.Environ(), r.Env...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = time.Second
	c.Stdout = writer(func(b []byte) error { return s.send(protocol.Reply{Out: b}) })
	c.Stderr = writer(func(b []byte) error { return s.send(protocol.Reply{Err: b}) })
	err := c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode()
	}
	_ = s.send(protocol.Reply{Err: []byte("guest: " + err.Error() + "\n")})
	return 125
}
