// Package microvm boots a QEMU that can be a sandbox: with the SCSI controller, the port and the
// agent that the qemu backend needs.
package microvm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/qmp"
)

// Config configures a microVM.
type Config struct {
	Dir     string // sockets and console; made if it does not exist
	Kernel  string
	Initrd  string
	Machine string // q35 or microvm
	Accel   string // kvm, tcg, auto, or "": Choose decides by the environment
	Memory  string // in QEMU's syntax; default 512M
	Append  string // appended to the kernel's command line
	Extra   []string
	// User runs QEMU as that user, which needs no right to a file: what it uses is opened for it. Nil means this process's.
	User *User
	// DieWithParent ends it with the thread that starts it, for tests. Otherwise it outlives its
	// starter.
	DieWithParent bool
}

// User is an unprivileged user for QEMU.
type User struct {
	UID    uint32
	Groups []uint32   // for /dev/kvm
	Files  []*os.File // what Config.Extra names as descriptors, from FirstFile on
	// Console gets what the guest writes to its console, and what QEMU says of its end, which is as long as the guest wants.
	Console io.Writer
}

// FirstFile is the number of the first of User.Files in QEMU.
const FirstFile = 3 + 4

// VM is a microVM that was started.
type VM struct {
	PID     int    `json:"pid"`
	Began   string `json:"began,omitempty"` // see linux.ProcessStart; empty if recorded by an older version
	QMP     string `json:"qmp"`
	Channel string `json:"channel"`
	Magic   string `json:"magic"` // hexadecimal
	Accel   string `json:"accel"`
	Console string `json:"console"`
	// Why is Choice.Why, of a microVM that this process started.
	Why string `json:"-"`

	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended; how it did is in err
	err   error
}

const program = "qemu-system-x86_64"

// installed returns an error if there is no QEMU that can be started.
func installed() error {
	if _, err := exec.LookPath(program); err != nil {
		return fmt.Errorf("a microVM needs QEMU: %w; install it (Debian: apt-get install qemu-system-x86), or add its directory to PATH", err)
	}
	return nil
}

// image returns an error if a file that the guest boots from is missing.
func (c Config) image() error {
	for _, f := range []string{c.Kernel, c.Initrd} {
		if _, err := os.Stat(f); err != nil {
			return fmt.Errorf("%w; `make guest` builds a kernel and an initramfs", err)
		}
	}
	return nil
}

// Start starts a microVM. It does not wait for the guest.
func Start(ctx context.Context, c Config) (*VM, error) {
	if err := installed(); err != nil {
		return nil, err
	}
	if err := c.image(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, err
	}
	choice, err := Choose(ctx, c)
	if err != nil {
		return nil, err
	}
	c.Accel = choice.Accel
	magic := make([]byte, 16)
	if _, err := rand.Read(magic); err != nil {
		return nil, err
	}
	// Guests up to v0.1.0 hold back a message's last bytes while they could begin the magic.
	// Messages end in this byte only by chance: it is neither text nor the end of a number.
	magic[0] = 0xfe
	at := func(name string) string { return filepath.Join(c.Dir, name) }
	vm := &VM{QMP: at("qmp.sock"), Channel: at("guest.sock"), Magic: hex.EncodeToString(magic), Accel: c.Accel, Console: at("console"),
		Why: choice.Why}
	args, err := c.arguments(vm)
	if err != nil {
		return nil, err
	}
	vm.cmd = exec.Command(program, args...)
	vm.cmd.SysProcAttr = linux.NewSession()
	started := func() {}
	said := func() string { b, _ := os.ReadFile(at("qemu.log")); return string(b) }
	if c.DieWithParent {
		runtime.LockOSThread()
		vm.cmd.SysProcAttr = linux.KilledWithThread()
	}
	if c.User == nil {
		errs, err := os.OpenFile(at("qemu.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return nil, err
		}
		defer errs.Close()
		vm.cmd.Stderr = errs
	} else {
		own, err := c.open(vm)
		if err != nil {
			closeAll(own)
			return nil, err
		}
		// QEMU alone has them then: if it ends, whoever connects sees that.
		started = func() { closeAll(own) }
		vm.cmd.ExtraFiles, vm.cmd.Stdout = append(own, c.User.Files...), c.User.Console
		vm.cmd.SysProcAttr = linux.AsUser(c.User.UID, c.User.Groups...)
		first := &beginning{}
		vm.cmd.Stderr, said = io.MultiWriter(first, c.User.Console), first.text
	}
	err = vm.run()
	started()
	if err != nil {
		return nil, err
	}
	vm.PID = vm.cmd.Process.Pid
	vm.Began, _ = linux.ProcessStart(vm.PID) // it may have ended
	for {
		q, err := qmp.Dial(ctx, vm.QMP)
		if err == nil {
			return vm, q.Close()
		}
		if ctx.Err() != nil || !alive(vm.cmd) {
			vm.Kill()
			return nil, fmt.Errorf("%s does not start: %w: %s", program, err, said())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// beginning keeps the first bytes that are written to it.
type beginning struct{ b []byte }

func (f *beginning) Write(b []byte) (int, error) {
	const most = 4096
	f.b = append(f.b, b[:min(len(b), most-len(f.b))]...)
	return len(b), nil
}

// text is for when nothing is written any more.
func (f *beginning) text() string { return string(f.b) }

// open opens what QEMU inherits, in the order of its descriptors: its sockets, kernel and initramfs.
func (c Config) open(vm *VM) (files []*os.File, err error) {
	for _, path := range []string{vm.QMP, vm.Channel} {
		f, err := Listen(path)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	for _, path := range []string{c.Kernel, c.Initrd} {
		f, err := os.Open(path)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// Listen makes a socket that only root can connect to, for a program to inherit. It replaces what an earlier process left.
func Listen(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := linux.ListenPrivate(path, 0o600)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	return u.File()
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// run starts QEMU. exec.Cmd.Wait is called once only: of two at the same time, one may wait forever.
func (vm *VM) run() error {
	if err := vm.cmd.Start(); err != nil {
		return err
	}
	vm.ended = make(chan struct{})
	go func() { vm.err = vm.cmd.Wait(); close(vm.ended) }()
	return nil
}

// Wait waits for the end of a microVM that this process started.
func (vm *VM) Wait() error { <-vm.ended; return vm.err }

func alive(c *exec.Cmd) bool {
	state, err := os.ReadFile("/proc/" + strconv.Itoa(c.Process.Pid) + "/stat")
	return err == nil && !bytes.Contains(state, []byte(") Z "))
}

// Alive reports whether it runs. Its pid may be reused by now.
func (vm *VM) Alive() bool {
	began, err := linux.ProcessStart(vm.PID)
	return err == nil && (vm.Began == "" || began == vm.Began)
}

// Kill ends it at once, and waits for that.
func (vm *VM) Kill() {
	if vm.cmd == nil {
		p, err := os.FindProcess(vm.PID) // this prevents reuse of the pid
		if err == nil && vm.Alive() {
			_ = p.Kill() // it may have ended
		}
		return
	}
	_ = vm.cmd.Process.Kill()
	_ = vm.Wait() // "signal: killed"
}

// Save stores what Load needs.
func (vm *VM) Save(dir string) error {
	b, err := json.MarshalIndent(vm, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "vm.json"), b, 0o600)
}

// Load reads what Save wrote.
func Load(dir string) (*VM, error) {
	b, err := os.ReadFile(filepath.Join(dir, "vm.json"))
	if err != nil {
		return nil, err
	}
	vm := &VM{}
	return vm, json.Unmarshal(b, vm)
}

func (c Config) arguments(vm *VM) ([]string, error) {
	if c.Memory == "" {
		c.Memory = "512M"
	}
	cmdline := "console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on crust.magic=" + vm.Magic
	if c.Accel == "tcg" {
		// x86's kernel counts timer ticks in a time that it measures by instructions. On a busy
		// machine an emulated kernel sees none, and panics: "IO-APIC + timer doesn't work".
		cmdline += " no_timer_check"
	}
	qmp, guest, kernel, initrd, console := "path="+vm.QMP, "path="+vm.Channel, c.Kernel, c.Initrd, "file,id=console,path="+vm.Console
	if c.User != nil { // the order of open
		qmp, guest, kernel, initrd, console = "fd=3", "fd=4", "/proc/self/fd/5", "/proc/self/fd/6", "stdio,id=console,signal=off"
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "crust-sandbox",
		"-smp", c.processors(), "-m", c.Memory,
		"-kernel", kernel, "-initrd", initrd,
		"-chardev", console, "-serial", "chardev:console",
		"-chardev", "socket,id=guest," + guest + ",server=on,wait=off",
		"-chardev", "socket,id=qmp," + qmp + ",server=on,wait=off", "-mon", "chardev=qmp,mode=control",
	}
	// Emulated five-level page tables have crashed guests. A kernel that sees "enhanced rep movsb" copies by bytes, which hardware does
	// at once and QEMU one by one; without it the kernel copies by eight bytes, and all that a guest does takes about a sixth less.
	cpu, accel := "max,la57=off,erms=off", ",accel="+c.Accel
	switch c.Accel {
	case "kvm":
		cpu = "host"
	case "tcg":
		// QEMU keeps what it has translated of the guest's code, by default up to 1 GiB in the memory of the host. Guests are as fast with
		// 96 MiB, and slower with less.
		accel = ""
		args = append(args, "-accel", "tcg,tb-size=96")
	}
	args = append(args, "-cpu", cpu)
	switch c.Machine {
	case "", "q35":
		args = append(args, "-M", "q35"+accel, "-device", "virtio-serial-pci", "-device", "virtio-scsi-pci,id=crust-scsi")
	case "microvm":
		args = append(args, "-M", "microvm"+accel+",pit=on,pic=on,rtc=on", "-global", "virtio-mmio.force-legacy=false",
			"-device", "virtio-serial-device", "-device", "virtio-scsi-device,id=crust-scsi")
		if c.Accel == "tcg" {
			// Without a paravirtual clock the guest calibrates, sometimes fails, and then has no
			// timer.
			cmdline += " tsc_early_khz=2000000"
		}
	default:
		return nil, fmt.Errorf("machine %q: q35 or microvm", c.Machine)
	}
	args = append(args, "-device", "virtserialport,chardev=guest,name=crust.guest", "-append", strings.TrimSpace(cmdline+" "+c.Append))
	return append(args, c.Extra...), nil
}

// processors is how many the guest has. QEMU 7.2 emulates several in as many threads, and now and then such a guest hangs for ever ("soft
// lockup" on its console).
func (c Config) processors() string {
	if c.Accel == "tcg" {
		return "1"
	}
	return "2"
}
