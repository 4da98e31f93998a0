// Command crust-guest is the agent inside a microVM. It mounts the volumes that crustd attached,
// with the same code that mounts volumes on hosts. It runs as PID 1 in a guest that has no other
// init, and as a service in one that has.
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

	"github.com/mdlayher/vsock"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/crust-csi/crust-csi/internal/channel"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

func main() {
	first := os.Getpid() == 1
	err := run(first)
	fmt.Println("crust-guest:", err)
	if first {
		time.Sleep(500 * time.Millisecond) // let the console drain
		_ = linux.PowerOff()
	}
	os.Exit(1)
}

func run(first bool) error {
	dir := flag.String("dir", "/run/crust", "directory below which volumes are mounted")
	magicText := flag.String("magic", "",
		"32 hexadecimal digits by which a connection begins (default: crust.magic= of the kernel's command line)")
	address := flag.String("listen", "", "vsock:PORT instead of the virtio-serial port "+channel.PortName)
	peer := flag.Uint("vsock-peer", uint(vsock.Host), "context id of the host, from which alone vsock connections are taken")
	ask := flag.String("ask", "", "ask the agent at vsock:CID:PORT what it can, and exit")
	flag.Parse()
	if *ask != "" {
		return info(*ask)
	}
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
	l, err := channel.Listen(*address, magic, uint32(*peer))
	if err != nil {
		return err
	}
	fmt.Printf("crust-guest: Linux %s, serving on %s\n", linux.Uname(), l.Addr())
	const maxMessage = 256 << 10
	g := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second,
		PermitWithoutStream: true}), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("%s: panic: %v", info.FullMethod, p)
				}
				err = faultgrpc.Status(err)
			}()
			return handler(ctx, req)
		}))
	guestv1.RegisterGuestServer(g, s)
	return g.Serve(l)
}

// info prints the capabilities of another agent.
func info(address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return channel.Dial(ctx, address, nil) }))
	if err != nil {
		return err
	}
	defer conn.Close()
	r, err := guestv1.NewGuestClient(conn).Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return err
	}
	fmt.Printf("Linux %s: %s\n", r.GetKernel(), strings.Join(r.GetFileSystems(), ", "))
	os.Exit(0)
	return nil
}

// supervise is the work of PID 1: it keeps an agent running. The agent may die, of an out-of-memory
// kill for example, without the machine. A restart may fail for lack of memory, too.
func supervise() error {
	for {
		agent := exec.Command("/proc/self/exe", os.Args[1:]...)
		agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
		if err := agent.Start(); err != nil {
			fmt.Println("crust-guest: the agent cannot be started; this is tried again:", err)
			time.Sleep(time.Second)
			continue
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

// boot sets up what the rest needs on top of an initramfs.
func boot() error {
	for _, m := range [][3]string{
		{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"}, {"run", "/run", "tmpfs"},
		{"tmp", "/tmp", "tmpfs"},
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
	// In the order of their dependencies.
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

// loadPolicy loads the image's SELinux policy into the kernel, if it has one.
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
