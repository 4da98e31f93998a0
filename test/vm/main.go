// Command vm runs programs, above all compiled Go tests, as root in a microVM with another kernel
// and SELinux: QEMU in software emulation, no network.
//
//	vm run -kernel 6.1 COMMAND...   boots a guest for as long as COMMAND runs on this machine
//	vm exec BINARY ARGS...          inside COMMAND: runs BINARY in that guest, for `go test -exec`
//
// prepare.sh makes its files. The guest has the project's directory at the same path. QEMU ends
// with this process, however that ends.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/test/virtiofs"
	"github.com/crust-csi/crust-csi/test/vm/protocol"
)

const socketVariable = "CRUST_VM_SOCKET"

func main() {
	code, err := 2, errors.New("usage: vm run -kernel 6.1|6.12 COMMAND, or vm exec BINARY")
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case "run":
			code, err = runCommand(os.Args[2:])
		case "exec":
			code, err = execCommand(os.Args[2:])
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
	}
	os.Exit(code)
}

// execCommand runs in the guest what `go test` wanted to run here.
func execCommand(argv []string) (int, error) {
	c, err := net.Dial("unix", os.Getenv(socketVariable))
	if err != nil {
		return 2, fmt.Errorf("no guest runs: %w; use vm run", err)
	}
	defer c.Close()
	dir, err := os.Getwd()
	if err != nil {
		return 2, err
	}
	var env []string
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, "CRUST_") {
			env = append(env, e)
		}
	}
	// When this process ends, by any signal, the connection closes, and the launcher kills the
	// program in the guest.
	if err := json.NewEncoder(c).Encode(protocol.Request{Argv: argv, Env: env, Dir: dir}); err != nil {
		return 2, err
	}
	replies := json.NewDecoder(c)
	for {
		var r protocol.Reply
		if err := replies.Decode(&r); err != nil {
			return 2, fmt.Errorf("the guest went away: %w", err)
		}
		if _, err := os.Stdout.Write(r.Out); err != nil {
			return 2, err
		}
		if _, err := os.Stderr.Write(r.Err); err != nil {
			return 2, err
		}
		if r.Exit != nil {
			return *r.Exit, nil
		}
	}
}

type guest struct {
	dir     string // of this run
	qemu    *exec.Cmd
	port    net.Conn
	send    *json.Encoder
	replies *json.Decoder
	died    atomic.Bool
}

// exitGuestDied means that the guest's kernel or its emulator broke, which is no verdict on what
// ran in it.
const exitGuestDied = 3

func runCommand(args []string) (code int, err error) {
	flags := flag.NewFlagSet("vm run", flag.ExitOnError)
	kernel := flags.String("kernel", "6.1", "the guest's kernel: 6.1 or 6.12")
	state := flags.String("state", ".cache/vm", "what prepare.sh made")
	share := flags.String("share", ".", "directory that the guest has at the same path")
	memory := flags.String("memory", "2G", "of the guest")
	// With several, software emulation breaks a guest's kernel now and then.
	cpus := flags.Int("cpus", 1, "processors of the guest")
	if err := flags.Parse(args); err != nil || flags.NArg() == 0 {
		return 2, errors.New("no command was given")
	}
	dir, err := os.MkdirTemp("", "crust-vm-")
	if err != nil {
		return 2, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	// PR_SET_PDEATHSIG belongs to the thread that starts the child.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	g, begin := &guest{}, time.Now()
	defer func() { g.stop() }()
	for try := 1; ; try++ {
		g = &guest{dir: filepath.Join(dir, strconv.Itoa(try))}
		if err := os.Mkdir(g.dir, 0o700); err != nil {
			return 2, err
		}
		err := g.start(ctx, *kernel, *state, *share, *memory, *cpus)
		if err == nil {
			break
		}
		err = fmt.Errorf("%w\nthe guest's console said:\n%s", err, g.console())
		// A kernel that patches its own code while it boots does not always survive that on several emulated processors.
		if *cpus == 1 || try == 3 || !strings.Contains(g.console(), "Kernel panic") {
			return 2, err
		}
		g.stop()
		fmt.Fprintf(os.Stderr, "vm: %v\nvm: the guest is booted again\n", err)
	}
	fmt.Fprintf(os.Stderr, "vm: guest with Linux %s is up after %v\n", *kernel, time.Since(begin).Round(10*time.Millisecond))
	l, err := net.Listen("unix", filepath.Join(dir, "exec.sock"))
	if err != nil {
		return 2, err
	}
	defer l.Close()
	go g.serve(l)
	c := exec.CommandContext(ctx, flags.Arg(0), flags.Args()[1:]...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	c.Env = append(os.Environ(), socketVariable+"="+filepath.Join(dir, "exec.sock"))
	c.SysProcAttr = linux.KilledWithThread()
	err = c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit):
		kept := filepath.Join(*state, "console-"+*kernel+".log")
		werr := os.WriteFile(kept, []byte(g.console()), 0o644)
		code = max(exit.ExitCode(), 1)
		if g.died.Load() {
			code = exitGuestDied
		}
		return code, errors.Join(fmt.Errorf("failed in the guest with Linux %s; its console is in %s and says\n%s", *kernel, kept,
			lastWords(g.console())), werr)
	}
	return 2, err
}

func (g *guest) child(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.SysProcAttr = linux.KilledWithThread()
	return c
}

func (g *guest) start(ctx context.Context, kernel, state, share, memory string, cpus int) error {
	var err error
	if share, err = filepath.Abs(share); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(state, "kernel-"+kernel, "boot/vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("no kernel %s in %s: run test/vm/prepare.sh", kernel, state)
	}
	root, err := filepath.Abs(filepath.Join(state, "root.img"))
	if err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(g.dir, name) }
	if out, err := exec.CommandContext(ctx, "qemu-img", "create", "-q", "-f", "qcow2", "-b", root,
		"-F", "raw", at("root.qcow2")).CombinedOutput(); err != nil {
		return fmt.Errorf("qemu-img: %w %s", err, out)
	}
	if _, err := virtiofs.Serve(share, at("fs.sock")); err != nil {
		return err
	}
	port, err := virtiofs.Listen(at("port.sock"))
	if err != nil {
		return err
	}
	// What protects a kernel from its programs, or moves many bytes at once, costs an emulated guest a quarter of its speed. (With AVX and
	// without xsave, btrfs cannot be loaded.)
	const cpu = "max,la57=off,erms=off,smap=off,smep=off,umip=off,fsgsbase=off"
	g.qemu = g.child(ctx, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35,accel=tcg", "-cpu", cpu, "-smp", strconv.Itoa(cpus), "-m", memory,
		"-object", "memory-backend-memfd,id=mem,size="+memory+",share=on", "-numa", "node,memdev=mem",
		"-kernel", images[0], "-initrd", filepath.Join(state, "initramfs-"+kernel),
		"-append", "console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on no_timer_check security=selinux selinux=1 enforcing=0 crust.share="+share,
		"-chardev", "file,id=console,path="+at("console"), "-serial", "chardev:console",
		"-drive", "file="+at("root.qcow2")+",if=virtio,format=qcow2,cache=unsafe",
		"-chardev", "socket,id=port,fd=3,server=on,wait=on",
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name="+protocol.Port,
		"-chardev", "socket,id=fs,path="+at("fs.sock"), "-device", "vhost-user-fs-pci,chardev=fs,tag=share")
	var said bytes.Buffer
	g.qemu.Stderr, g.qemu.ExtraFiles = &said, []*os.File{port}
	err = g.qemu.Start()
	port.Close() // so that the connection ends with a QEMU that ends
	if err != nil {
		return err
	}
	// QEMU starts the guest when its port is connected, so no output is lost.
	if g.port, err = net.Dial("unix", at("port.sock")); err != nil {
		return err
	}
	g.send, g.replies = json.NewEncoder(g.port), json.NewDecoder(g.port)
	// A guest that ends closes the port, so only a hang waits this long.
	if err := g.port.SetReadDeadline(time.Now().Add(15 * time.Minute)); err != nil {
		return err
	}
	var ready protocol.Reply
	if err := g.replies.Decode(&ready); err != nil || ready.Ready == "" {
		return fmt.Errorf("the guest did not come up: %w %s", err, said.String())
	}
	return g.port.SetReadDeadline(time.Time{})
}

// serve runs one program after another.
func (g *guest) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if err := g.forward(c); err != nil {
			fmt.Fprintln(os.Stderr, "vm:", err)
		}
		c.Close()
	}
}

func (g *guest) forward(c net.Conn) error {
	var r protocol.Request
	if err := json.NewDecoder(c).Decode(&r); err != nil {
		return err
	}
	if err := g.send.Encode(r); err != nil {
		return err
	}
	var ended atomic.Bool
	go func() {
		// The client sends nothing more: this returns when it leaves.
		if _, err := io.Copy(io.Discard, c); err == nil && !ended.Load() {
			_ = g.send.Encode(protocol.Request{Kill: true})
		}
	}()
	out := json.NewEncoder(c)
	for {
		var reply protocol.Reply
		if err := g.replies.Decode(&reply); err != nil {
			g.died.Store(true)
			return fmt.Errorf("the guest died: %w", err)
		}
		ended.Store(reply.Exit != nil)
		_ = out.Encode(reply) // the client may have left
		if reply.Exit != nil {
			return nil
		}
	}
}

func (g *guest) console() string {
	b, err := os.ReadFile(filepath.Join(g.dir, "console"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// stop ends QEMU and waits for it. The root disk is temporary.
func (g *guest) stop() {
	if g.port != nil {
		g.port.Close()
	}
	if g.qemu != nil && g.qemu.Process != nil {
		_ = g.qemu.Process.Kill()
		_ = g.qemu.Wait() // "signal: killed"
	}
}

// lastWords returns a kernel's output from its first complaint on, or else the end.
func lastWords(console string) string {
	const most = 6000
	first := len(console)
	for _, complaint := range []string{"BUG: ", "Oops: ", "Kernel panic", "general protection fault", "rcu: INFO", "watchdog: "} {
		if i := strings.Index(console, complaint); i >= 0 {
			first = min(first, i)
		}
	}
	if first == len(console) {
		return console[max(0, len(console)-most):]
	}
	return console[first:min(len(console), first+most)]
}
