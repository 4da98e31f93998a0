package podvm

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/channel"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/microvm"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/podguest"
	"github.com/crust-csi/crust-csi/pkg/crust"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// MonitorCommand and StubCommand are the first arguments that make crust-oci a pod's monitor or a container's stub.
const (
	MonitorCommand = "pod-monitor"
	StubCommand    = "pod-stub"
)

// The names of a pod's sockets and its log.
const (
	podSocket   = "pod.sock"   // the monitor's, for crust-oci
	stubSocket  = "stub.sock"  // the monitor's, for stubs
	guestSocket = "port.sock"  // QEMU's, for the monitor
	disksSocket = "disks.sock" // QEMU's, for the monitor: QMP
	filesSocket = "virtiofs.sock"
	monitorLog  = "monitor.log"
	consoleLog  = "console.log" // what the guest and the programs write
)

const (
	virtiofsd = "/usr/lib/qemu/virtiofsd"
	passt     = "passt"
	mostOfLog = 256 << 10 // bytes
	mostOfEnd = 16 << 10  // bytes of the monitor's log for how the pod ends, whatever its guest said before
)

type monitor struct {
	pod     *Pod
	log     *limited
	console *limited // of the guest, and what the programs write
	guest   guestv1.PodClient
	disks   *disks
	begun   chan struct{} // closed when the guest has begun
	ended   chan error    // why the pod must end

	guestv1.UnimplementedPodServer
}

var errQEMU = errors.New("QEMU has ended")

// say writes a line to the pod's log. Parts of it may come from the guest.
func (m *monitor) say(what ...any) {
	fmt.Fprintln(m.log, line(what...))
}

func line(what ...any) string {
	return plain.Text(strings.TrimSuffix(fmt.Sprintln(what...), "\n"), plain.Most)
}

func (p *Pod) open(name string, most int) (*os.File, *limited, error) {
	f, err := os.OpenFile(p.at(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	return f, &limited{w: f, left: most}, err
}

// Monitor runs a pod's microVM until one of its programs, or the pod's own container, ends. The process is in the pod's network namespace
// and cgroup, and started is called once the microVM can be registered.
func Monitor(dir string, started func()) error {
	runtime.LockOSThread() // the programs end with this thread
	// virtiofsd has a file open for each that the guest knows. As root of the pod's users, it may not raise its limit by itself.
	if err := linux.AllowDescriptors(1_000_000); err != nil {
		return err
	}
	pods := Pods{filepath.Dir(dir)}
	pod, err := pods.find(filepath.Base(dir))
	if err != nil {
		return err
	}
	m := &monitor{pod: pod, disks: &disks{socket: pod.at(disksSocket), have: map[string]*rawDisk{}}, begun: make(chan struct{}),
		ended: make(chan error, 4)}
	for name, w := range map[string]**limited{monitorLog: &m.log, consoleLog: &m.console} {
		f, limited, err := pod.open(name, mostOfLog)
		if err != nil {
			return err
		}
		defer f.Close()
		*w = limited
	}
	pause, err := linux.ProcessEnd(pod.Pause.PID)
	if err != nil {
		return err
	}
	defer pause.Close()
	if !pod.Pause.same() {
		return errors.New("the pod's own container has ended")
	}
	ctx, cancel := signal.NotifyContext(context.Background(), linux.Signal(15))
	defer cancel()
	stopped := make(chan struct{})
	booting, stop := context.WithTimeout(ctx, bootTime)
	defer stop()
	go func() {
		linux.WaitEnd(ctx, pause) // or SIGTERM
		stop()
		close(stopped)
	}()
	network, err := findNetwork()
	if err != nil {
		return err
	}
	// They hold volumes of the node. The call that deletes the pod may have been interrupted.
	defer func() {
		if err := pod.unshareAll(); err != nil {
			m.say("what was shared with the guest stays mounted:", err)
		}
	}()
	vm, err := m.start(booting, network != nil)
	if err != nil {
		return err
	}
	defer vm.Kill()
	if pod.Why != "" {
		m.say("crust-oci:", pod.Why)
	}
	g, err := record(vm)
	if err != nil {
		return err
	}
	end, err := m.serve(ctx, g.Magic)
	if err != nil {
		return err
	}
	defer end()
	go m.begin(ctx, network)
	go m.disks.follow(ctx, m.say)
	if err := writeJSON(pod.at("guest.json"), g); err != nil {
		return err
	}
	started()
	select {
	case err = <-m.ended:
		err = m.why(err)
	case <-stopped:
	}
	if !errors.Is(err, errQEMU) {
		if lost := m.end(); lost != nil {
			m.sayAtTheEnd("what its containers wrote last may be lost:", lost)
		}
	}
	pod.Pause.kill() // if it stayed, the kubelet would keep a pod that can run nothing
	return err
}

// why returns why the pod must end, and has it in the log.
func (m *monitor) why(err error) error {
	err = m.cause(err)
	m.sayAtTheEnd(err)
	return err
}

// sayAtTheEnd writes a line that is kept, with the pod's log.
func (m *monitor) sayAtTheEnd(what ...any) {
	m.log.leave(mostOfEnd)
	m.say(append([]any{theEnd}, what...)...)
}

// cause returns why the pod must end. If QEMU ends, the other programs end at once, and may be seen first.
func (m *monitor) cause(err error) error {
	moment := time.After(2 * time.Second)
	for !errors.Is(err, errQEMU) {
		select {
		case next := <-m.ended:
			if errors.Is(next, errQEMU) {
				return next
			}
		case <-moment:
			return err
		}
	}
	return err
}

// end ends the pod's containers, and has crustd unmount its volumes in the guest. Otherwise the data in the guest's page cache would be
// lost.
func (m *monitor) end() (err error) {
	select {
	case <-m.begun:
	default:
		return nil // nothing was mounted for a container yet
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime+m.disks.writeTime())
	defer cancel()
	if _, eerr := m.guest.End(ctx, &guestv1.EndRequest{}); eerr != nil {
		err = fmt.Errorf("the containers do not end: %w", eerr)
	}
	// Containers that do not end leave no less time for this.
	ctx, cancel = context.WithTimeout(context.Background(), unmountTime)
	defer cancel()
	if uerr := m.unmount(ctx); uerr != nil {
		err = errors.Join(err, fmt.Errorf("the volumes are not unmounted: %w", uerr))
	}
	return err
}

// unmount has crustd take back the pod's volumes. It tries again if the kubelet asks for the same just then, if crustd is being restarted,
// and if crustd has not reached the microVM yet after that (FailedPrecondition).
func (m *monitor) unmount(ctx context.Context) error {
	server, err := crust.Dial(m.pod.Server)
	if err != nil {
		return err
	}
	defer server.Close()
	for {
		_, err := server.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: m.pod.ID})
		pause := 50 * time.Millisecond
		switch status.Code(err) {
		case codes.Aborted, codes.Unavailable:
		case codes.FailedPrecondition:
			pause = time.Second // it may also be something that lasts
		default:
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

func record(vm *microvm.VM) (guest, error) {
	magic, err := hex.DecodeString(vm.Magic)
	return guest{QEMU: vm.PID, QMP: vm.QMP, Channel: vm.Channel, Magic: magic}, err
}

// start starts virtiofsd, passt if the pod has a network, and QEMU.
func (m *monitor) start(ctx context.Context, network bool) (*microvm.VM, error) {
	files, err := m.virtiofsd()
	if err != nil {
		return nil, err
	}
	defer files.Close()
	port, err := microvm.Listen(m.pod.at(guestSocket))
	if err != nil {
		return nil, err
	}
	defer port.Close()
	qmp, err := microvm.Listen(m.pod.at(disksSocket))
	if err != nil {
		return nil, err
	}
	defer qmp.Close()
	user := &microvm.User{UID: m.pod.UID, Files: []*os.File{files, port, qmp}, Console: m.console}
	if m.pod.Accel == "kvm" {
		if user.Groups, _, err = kvmGroups(); err != nil {
			return nil, err
		}
	}
	size := strconv.FormatInt(m.pod.Memory>>20, 10) + "M"
	fd := func(i int) string { return strconv.Itoa(microvm.FirstFile + i) }
	extra := []string{
		"-object", "memory-backend-memfd,id=memory,share=on,size=" + size, "-machine", "memory-backend=memory",
		"-chardev", "socket,id=files,fd=" + fd(0), "-device", "vhost-user-fs-pci,chardev=files,tag=" + podguest.Tag,
		"-chardev", "socket,id=pod,fd=" + fd(1) + ",server=on,wait=off",
		"-device", "virtserialport,chardev=pod,name=" + channel.PodPortName,
		"-chardev", "socket,id=disks,fd=" + fd(2) + ",server=on,wait=off", "-mon", "chardev=disks,mode=control",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	if network {
		packets, err := m.passt()
		if err != nil {
			return nil, err
		}
		defer packets.Close()
		user.Files = append(user.Files, packets)
		extra = append(extra, "-netdev", "stream,id=net,server=off,addr.type=fd,addr.str="+fd(3), "-device", "virtio-net-pci,netdev=net")
	}
	vm, err := microvm.Start(ctx, microvm.Config{
		Dir: m.pod.dir, Kernel: m.pod.Kernel, Initrd: m.pod.Initrd, Memory: size, Accel: m.pod.Accel, Append: "crust.pod=1",
		Extra: extra, User: user,
	})
	if err != nil {
		return nil, err
	}
	go func() { m.ended <- fmt.Errorf("%w: %w", errQEMU, how(vm.Wait())) }()
	return vm, nil
}

// how returns how a program ended, as an error even for exit status 0.
func how(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// watch reports the end of a program that the pod needs.
func (m *monitor) watch(name string, c *exec.Cmd) {
	go func() { m.ended <- fmt.Errorf("%s has ended: %w", name, how(c.Wait())) }()
}

// virtiofsd serves the pod's directory, and returns a connection to it. It keeps its privileges because it makes files of any
// owner, or of any of the pod's users if it has users of its own. It sees only that directory.
func (m *monitor) virtiofsd() (*os.File, error) {
	socket := m.pod.at(filesSocket)
	l, err := microvm.Listen(socket)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	args := []string{"--fd=3", "-o", "sandbox=namespace", "-o", "cache=auto", "-o", "announce_submounts", "-o", "log_level=warn"}
	shared := m.pod.at("shared")
	c := exec.Command(virtiofsd, append(args, "-o", "source="+shared)...)
	c.SysProcAttr = linux.KilledWithThread()
	if u := m.pod.Users; u != nil {
		c = exec.Command("/proc/self/exe", append([]string{FilesCommand}, append(args, "-o", "source="+filesAt)...)...)
		c.SysProcAttr = linux.AsRootOf(u.UID, u.GID, u.Size)
		if err := os.Chdir(shared); err != nil { // it starts where this process is
			return nil, err
		}
	}
	c.ExtraFiles, c.Stderr = []*os.File{l}, m.console
	err = errors.Join(c.Start(), os.Chdir("/"))
	if err != nil {
		return nil, fmt.Errorf("%w; a pod in a microVM needs virtiofsd (Debian 12: qemu-system-common)", err)
	}
	m.watch("virtiofsd", c)
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	return conn.File()
}

// passt connects the guest to the pod's network namespace, without privileges, and returns the other end for QEMU.
func (m *monitor) passt() (*os.File, error) {
	ours, theirs, err := linux.SocketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	c := exec.Command(passt, "--fd", "3", "--foreground", "--quiet", "--stderr", "--no-map-gw", "-t", "none", "-u", "none")
	c.ExtraFiles, c.Stderr, c.SysProcAttr = []*os.File{theirs}, m.console, linux.AsUser(m.pod.UID)
	if err := c.Start(); err != nil {
		ours.Close()
		return nil, fmt.Errorf("%w; the network of a pod in a microVM needs passt (Debian: apt-get install passt)", err)
	}
	m.watch(passt, c)
	return ours, nil
}
