// Command crust-guest is the agent inside a microVM: it mounts the volumes that
// crustd attached, with the same code that mounts volumes on hosts. It works as
// PID 1 of a guest that has nothing else, and as a service of one that has.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// portName is that of the virtio-serial port.
const portName = "crust.guest"

func main() {
	first := os.Getpid() == 1
	err := run(first)
	fmt.Println("crust-guest:", err)
	if first {
		time.Sleep(500 * time.Millisecond) // for the console to drain
		_ = linux.PowerOff()
	}
	os.Exit(1)
}

func run(first bool) error {
	dir := flag.String("dir", "/run/crust", "directory below which volumes are mounted")
	magicText := flag.String("magic", "", "32 hexadecimal digits by which a connection begins (default: crust.magic= of the kernel's command line)")
	flag.Parse()
	if first {
		if err := boot(); err != nil {
			return err
		}
		return supervise()
	}
	magic, err := parseMagic(*magicText)
	if err != nil {
		return err
	}
	s, err := newServer(*dir)
	if err != nil {
		return err
	}
	l, err := listen(magic)
	if err != nil {
		return err
	}
	fmt.Printf("crust-guest: Linux %s, serving on %s\n", linux.Uname(), l.Addr())
	const maxMessage = 256 << 10
	g := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("%s: panic: %v", info.FullMethod, p)
				}
				err = rpcserver.Status(err)
			}()
			return handler(ctx, req)
		}))
	guestv1.RegisterGuestServer(g, s)
	return g.Serve(l)
}

// supervise is what PID 1 does: it keeps an agent running. The agent may die, of
// a lack of memory for one, without the machine.
func supervise() error {
	for {
		agent := exec.Command("/proc/self/exe", os.Args[1:]...)
		agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
		if err := agent.Start(); err != nil {
			return err
		}
		if err := linux.Reap(agent.Process.Pid); err != nil {
			return err
		}
		fmt.Println("crust-guest: the agent has ended; it is started again")
		time.Sleep(50 * time.Millisecond)
	}
}

func parseMagic(text string) ([]byte, error) {
	if text == "" {
		b, err := os.ReadFile("/proc/cmdline")
		if err != nil {
			return nil, err
		}
		for _, word := range strings.Fields(string(b)) {
			if v, ok := strings.CutPrefix(word, "crust.magic="); ok {
				text = v
			}
		}
	}
	if text == "" {
		return nil, nil
	}
	var magic []byte
	if _, err := fmt.Sscanf(text, "%x", &magic); err != nil || len(magic) != vport.MagicLength {
		return nil, fmt.Errorf("magic %q: it has 32 hexadecimal digits", text)
	}
	return magic, nil
}

// listen is the one place that knows how the host reaches this guest.
func listen(magic []byte) (net.Listener, error) {
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if b, err := os.ReadFile(n); err != nil || strings.TrimSpace(string(b)) != portName {
				continue
			}
			port, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			if err != nil {
				return nil, err
			}
			return vport.Listen(port, magic), nil
		}
	}
	return nil, fmt.Errorf("this machine has no virtio-serial port %s", portName)
}

// boot makes of an initramfs what the rest needs.
func boot() error {
	for _, m := range [][3]string{
		{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"}, {"run", "/run", "tmpfs"}, {"tmp", "/tmp", "tmpfs"},
	} {
		if err := os.MkdirAll(m[1], 0o755); err != nil {
			return err
		}
		if err := linux.Mount(m[0], m[1], m[2], false, ""); err != nil && !errors.Is(err, linux.EBUSY) {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if console, err := os.OpenFile("/dev/console", os.O_RDWR, 0); err == nil {
		os.Stdout, os.Stderr = console, console
	}
	if err := os.Setenv("PATH", "/bin:/sbin:/usr/bin:/usr/sbin"); err != nil {
		return err
	}
	// In the order in which they need each other.
	files, err := filepath.Glob("/modules/*")
	if err != nil {
		return err
	}
	sort.Strings(files)
	for _, f := range files {
		if err := linux.LoadModule(f); err != nil && !errors.Is(err, linux.EEXIST) {
			return fmt.Errorf("module %s: %w", f, err)
		}
	}
	return loadPolicy()
}

// loadPolicy gives the kernel a SELinux policy, if there is one in the image.
func loadPolicy() error {
	policy, err := os.ReadFile("/etc/selinux/policy")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := linux.Mount("selinuxfs", "/sys/fs/selinux", "selinuxfs", false, ""); err != nil {
		return fmt.Errorf("the image has a SELinux policy, and the kernel was started without SELinux: %w", err)
	}
	return os.WriteFile("/sys/fs/selinux/load", policy, 0)
}
