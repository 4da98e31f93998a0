package podvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Runtime carries out an OCI runtime's commands for pods in microVMs.
type Runtime struct {
	Host   string // the host's own OCI runtime
	Pods   Pods
	Server *crust.Client
	// Endpoint is the server's.
	Endpoint string
	// Config is the content of this program's configuration file.
	Config []byte
	// Resolve returns a mount source's path in the sandbox, "" if the source belongs to none of its volumes.
	Resolve func(ctx context.Context, sandbox, source string) (string, error)
	Kernel  string
	Initrd  string
	Memory  int64 // of a guest whose pod has no limit, in bytes
	// Accel is kvm, which refuses to emulate, tcg, which emulates, or auto: KVM if a guest has answered under it. "" is
	// microvm.AccelVariable, or else auto.
	Accel string
}

// How long something may take. The kubelet waits two minutes for a pod or container to be made, and containerd ten seconds for a container
// to be deleted.
const (
	bootTime    = 100 * time.Second
	deleteTime  = 5 * time.Second
	endTime     = 30 * time.Second // of a pod's containers
	unmountTime = time.Minute      // of its volumes, in the guest; the same again for raw block volumes
	sweepTime   = time.Second      // of what is left of all pods: the next sweep takes the rest
	lockTime    = 30 * time.Second // until other calls have made their pods' directories
)

// Call is a call of an OCI runtime.
type Call struct {
	Args    []string // all of them, for the host's runtime
	Command string
	ID      string // the container's
	Process string // the file that --process names
	Root    string // the directory that --root names
}

// globals are the options before the command, for another command about the same container.
func (c Call) globals() []string { return slices.Clone(c.Args[:slices.Index(c.Args, c.Command)]) }

// Do does what a call asks for. Commands that it does not know are for the host's runtime.
func (r *Runtime) Do(ctx context.Context, c Call) (done bool, err error) {
	pod, err := r.Pods.of(c.ID)
	if err != nil {
		return false, err
	}
	if pod != nil {
		switch c.Command {
		case "start":
			return true, r.start(ctx, pod, c)
		case "exec":
			return true, r.exec(ctx, pod, c)
		case "delete":
			return true, r.deleteContainer(ctx, pod, c)
		case "update", "pause", "resume", "checkpoint":
			return true, fmt.Errorf("container %s is in a microVM, where %s is not supported", c.ID, c.Command)
		}
		return false, nil
	}
	if c.Command != "delete" {
		return false, nil
	}
	pod, err = r.Pods.find(c.ID)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	return true, r.deletePod(ctx, pod, c)
}

// A HostError is a failure of the host's runtime. If that ended by itself, it has written the reason to where its caller looks for it.
type HostError struct{ err error }

func (e *HostError) Error() string { return e.err.Error() }
func (e *HostError) Unwrap() error { return e.err }

// Status is the exit status of the host's runtime, 0 if it did not end by itself. It may be that of a process that it ran.
func (e *HostError) Status() int {
	var exit *exec.ExitError
	if errors.As(e.err, &exit) {
		return max(0, exit.ExitCode())
	}
	return 0
}

// command is a call of the host's runtime. It ends with this process: otherwise it would go on after its caller has given it up.
func (r *Runtime) command(args ...string) *exec.Cmd {
	c := exec.Command(r.Host, args...)
	c.SysProcAttr = linux.KilledWithThread()
	return c
}

// host runs the host's runtime, with this process's streams.
func (r *Runtime) host(args ...string) error {
	c := r.command(args...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := c.Run(); err != nil {
		return &HostError{fmt.Errorf("%s: %w", filepath.Base(r.Host), err)}
	}
	return nil
}

// process returns the process of a container of the host's runtime.
func (r *Runtime) process(c Call) (process, error) {
	out, err := r.command(append(c.globals(), "state", c.ID)...).Output()
	if err != nil {
		return process{}, fmt.Errorf("%s state: %w", filepath.Base(r.Host), err)
	}
	var state struct{ Pid int }
	if err := json.Unmarshal(out, &state); err != nil {
		return process{}, err
	}
	return processOf(state.Pid)
}

// forgot tells whether the host's runtime certainly does not know a container any more: runc and crun keep a directory for each below
// their --root.
func (r *Runtime) forgot(c Call) bool {
	if c.Root == "" {
		return false
	}
	_, err := os.Lstat(filepath.Join(c.Root, c.ID))
	return errors.Is(err, os.ErrNotExist)
}

// CreatePod makes a pod's own container on the host, and a microVM beside it, and registers that as a sandbox.
func (r *Runtime) CreatePod(ctx context.Context, config map[string]any, c Call) (err error) {
	if err := refused(config, true); err != nil {
		return err
	}
	own, err := usersOf(config)
	if err != nil {
		return err
	}
	// A trial of KVM boots guests. They are no burden of this pod's, whose cgroup may be small.
	accel, why, err := r.accelerator(ctx)
	if err != nil {
		return err
	}
	program, err := ownProgram()
	if err != nil {
		return err
	}
	if err := r.host(c.Args...); err != nil {
		return err
	}
	pod := &Pod{ID: c.ID, Hostname: text(config, "hostname"), Kernel: r.Kernel, Initrd: r.Initrd, Memory: r.memory(config),
		Accel: accel, Why: why, Server: r.Endpoint, Program: program, config: r.Config, Users: own, Sysctls: map[string]string{}}
	for name, value := range sub(sub(config, "linux"), "sysctl") {
		pod.Sysctls[name] = fmt.Sprint(value)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.host(append(c.globals(), "delete", "--force", c.ID)...))
		}
	}()
	if pod.Pause, err = r.process(c); err != nil {
		return err
	}
	if err := r.Pods.make(ctx, pod); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.takeDown(ctx, pod))
		}
	}()
	if err := pod.launch(ctx); err != nil {
		return err
	}
	g, err := pod.guest()
	if err != nil {
		return err
	}
	_, err = r.Server.RegisterSandbox(ctx, &crustv1alpha1.RegisterSandboxRequest{SandboxId: pod.ID, Pid: int64(g.QEMU),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{Qemu: &crustv1alpha1.QemuSandbox{
			QmpSocket: g.QMP, ChannelSocket: g.Channel, ChannelMagic: g.Magic}}})
	if err != nil {
		return fmt.Errorf("the microVM cannot be registered with crustd, which mounts its volumes: %w", err)
	}
	return nil
}

// memory is what a guest gets: the pod's limit and what its kernel needs itself. That grows with the memory, by 64 bytes for each
// page, up to what the RuntimeClass's overhead has room for: a pod that is larger must run out of memory in the guest, not on the host.
func (r *Runtime) memory(config map[string]any) int64 {
	const kernel, pages, most = 192 << 20, 64, 96 << 20
	limit, err := strconv.ParseInt(text(sub(config, "annotations"), "io.kubernetes.cri.sandbox-memory"), 10, 64)
	if err != nil || limit <= 0 {
		return r.Memory
	}
	return (limit + min(limit/pages, most) + kernel) &^ (1<<20 - 1)
}

// takeDown ends a pod's microVM and removes its files.
func (r *Runtime) takeDown(ctx context.Context, p *Pod) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime+3*unmountTime)
	defer cancel()
	if err := p.endMonitor(ctx); err != nil {
		return err
	}
	_, err := r.Server.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: p.ID})
	if err != nil {
		p.say("deregister:", err) // crustd sees that the microVM has ended, or will when it starts again
	}
	return p.clear(ctx)
}

// clear removes the files and cgroups of a pod whose processes end. It fails if they do not, and can be repeated.
func (p *Pod) clear(ctx context.Context) error {
	if err := p.leave(ctx); err != nil {
		return err
	}
	return errors.Join(p.keepLog(), p.remove())
}

// endMonitor asks the monitor to end the pod properly, and kills it if it does not. Its programs end with it.
func (p *Pod) endMonitor(ctx context.Context) error {
	if !p.Monitor.runs() {
		return nil
	}
	end, err := linux.ProcessEnd(p.Monitor.PID)
	if err != nil || !p.Monitor.same() {
		return nil // it has ended just now
	}
	defer end.Close()
	found, err := os.FindProcess(p.Monitor.PID)
	if err != nil {
		return err
	}
	_ = found.Signal(linux.Signal(15)) // it may have ended
	patience, cancel := context.WithTimeout(ctx, endTime+2*unmountTime+5*time.Second)
	defer cancel()
	if !linux.WaitEnd(patience, end) {
		_ = found.Kill() // the same
		linux.WaitEnd(ctx, end)
		p.say(theEnd, "its monitor did not end in time, and was killed; what its containers wrote last may be lost")
	}
	return nil
}

// deleteHere has the host's runtime delete a container, unless an earlier call that was interrupted did. The runtime would say that the
// container does not exist, and containerd's shim takes that for success: it would not wait for the rest.
func (r *Runtime) deleteHere(c Call) error {
	if r.forgot(c) {
		return nil
	}
	return r.host(c.Args...)
}

// deletePod deletes what the host's runtime knows, and then all else. An earlier call may have been interrupted in between.
func (r *Runtime) deletePod(ctx context.Context, p *Pod, c Call) error {
	herr := r.deleteHere(c)
	if herr != nil && p.Pause.runs() {
		return herr
	}
	if err := r.takeDown(ctx, p); err != nil || r.forgot(c) {
		return err
	}
	return herr
}
