// Command crust-guest is the agent inside a microVM. It mounts the volumes that crustd attached,
// with the same code that mounts volumes on hosts. It runs as PID 1 in a guest that has no other
// init, and as a service in one that has.
package main

import (
	"cmp"
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
	"github.com/crust-csi/crust-csi/internal/podguest"
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
		linux.SyncWithin(10 * time.Second)
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
	pod := flag.Bool("pod", false, "run the containers of a pod, which crust-oci makes, and mount nothing")
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
	if *pod {
		return servePod(magic)
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
	g := grpc.NewServer(serving(maxMessage)...)
	guestv1.RegisterGuestServer(g, s)
	return g.Serve(l)
}

// servePod runs the containers of a pod.
func servePod(magic []byte) error {
	s, err := podguest.New()
	if err != nil {
		return err
	}
	// Containers without limits of their own inherit these. On a node, they have those of the container runtime's service. A kernel's own
	// are far less: 4096 files, and as many processes as its memory is large.
	if err := errors.Join(linux.AllowDescriptors(1<<20), linux.AllowProcesses()); err != nil {
		return err
	}
	l, err := channel.ListenPort(channel.PodPortName, magic)
	if err != nil {
		return err
	}
	fmt.Println("crust-guest: serving a pod on", l.Addr())
	const maxMessage = 4 << 20 // a container's config.json
	g := grpc.NewServer(serving(maxMessage)...)
	guestv1.RegisterPodServer(g, s)
	return g.Serve(l)
}

// serving are the options of both servers. No call ends the agent.
func serving(maxMessage int) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (_ any, err error) {
			defer func() { err = ended(info.FullMethod, recover(), err) }()
			return handler(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
			defer func() { err = ended(info.FullMethod, recover(), err) }()
			return handler(srv, s)
		}),
	}
}

func ended(method string, panicked any, err error) error {
	if panicked != nil {
		err = fmt.Errorf("%s: panic: %v", method, panicked)
	}
	return faultgrpc.Status(err)
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
// kill for example, without the machine. A restart may fail for lack of memory, too. The agent of a
// pod's containers is not started again: it held their streams, so the pod ends with it.
func supervise() error {
	pod := 0
	if _, ok := parameter("crust.pod"); ok {
		const dir = "/run/root"
		if err := errors.Join(os.MkdirAll(dir, 0o755), linux.LeaveInitialRoot(dir)); err != nil {
			return err
		}
		var err error
		if pod, err = startAgent("--pod"); err != nil {
			return err
		}
	}
	for {
		agent, err := startAgent()
		if err != nil {
			fmt.Println("crust-guest: the agent cannot be started; this is tried again:", err)
			time.Sleep(time.Second)
			continue
		}
		ended, err := linux.Reap(agent, cmp.Or(pod, agent))
		if err != nil {
			return err
		}
		if ended == pod {
			return errors.New("the agent of the pod's containers has ended")
		}
		fmt.Println("crust-guest: the agent has ended; it is started again")
		time.Sleep(50 * time.Millisecond)
	}
}

func startAgent(options ...string) (pid int, err error) {
	agent := exec.Command("/proc/self/exe", append(options, os.Args[1:]...)...)
	agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
	if err := agent.Start(); err != nil {
		return 0, err
	}
	if _, ok := parameter("crust.pod"); ok {
		// A container may use up the memory: that is its own end, and that of an agent only if nothing else is left to kill.
		const last = "-999"
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", agent.Process.Pid), []byte(last), 0o644); err != nil {
			fmt.Println("crust-guest:", err) // it may have ended
		}
	}
	return agent.Process.Pid, nil
}

// parameter returns a parameter of the kernel's command line.
func parameter(name string) (value string, ok bool) {
	b, _ := os.ReadFile("/proc/cmdline") // procfs is mounted
	for _, word := range strings.Fields(string(b)) {
		if v, found := strings.CutPrefix(word, name+"="); found {
			value, ok = v, true
		}
	}
	return value, ok
}

func parseMagic(text string) ([]byte, error) {
	if text == "" {
		text, _ = parameter("crust.magic")
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
