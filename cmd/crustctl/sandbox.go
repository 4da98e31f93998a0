package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/microvm"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func sandboxCommand(g *globals) *cobra.Command {
	c := group("sandbox", "Start, look at and end sandboxes of a CRUST server (crustd)")
	c.PersistentFlags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket")
	c.AddCommand(sandboxRun(g), sandboxList(g), sandboxExec(g), sandboxRemove(g), sandboxPublish(g), sandboxUnpublish(g), sandboxStats(g),
		sandboxExpand(g), sandboxBind(g), sandboxUnbind(g))
	return c
}

func (g *globals) withCrust(cmd *cobra.Command, f func(ctx context.Context, c *crust.Client) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), g.timeout)
	defer cancel()
	c, err := crust.Dial(g.crust)
	if err != nil {
		return err
	}
	defer c.Close()
	err = f(ctx, c)
	switch text := fmt.Sprint(err); {
	case status.Code(err) == codes.Unavailable && strings.Contains(text, "permission denied"):
		return fmt.Errorf("%w: %w: only root, and users of crustd's --allow-uid, may connect", errCrust, err)
	case status.Code(err) == codes.Unavailable && strings.Contains(text, "dial unix"):
		return fmt.Errorf("%w: %w (is crustd running? its socket is given with --crust)", errCrust, err)
	case status.Code(err) == codes.Unimplemented && strings.Contains(text, "unknown service crust."):
		return fmt.Errorf("%w: %w: what answers at %s is not crustd (csi-node's socket is given with --endpoint)", errCrust, err, g.crust)
	}
	return err
}

// errCrust marks errors about the CRUST socket, as opposed to the driver's.
var errCrust = errors.New("CRUST socket")

// sandboxes lists the sandboxes; here is the one with the given id, nil if there is none.
func sandboxes(ctx context.Context, c *crust.Client, id string) (all []*crustv1alpha1.Sandbox, here *crustv1alpha1.Sandbox, err error) {
	r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	for _, s := range r.GetSandboxes() {
		if s.GetSandboxId() == id {
			here = s
		}
	}
	return r.GetSandboxes(), here, err
}

// inSandbox finds the volume that a sandbox has at a host target.
func inSandbox(ctx context.Context, c *crust.Client, id, target string) (*crustv1alpha1.Volume, error) {
	all, here, err := sandboxes(ctx, c, id)
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		for _, v := range s.GetVolumes() {
			if v.GetHostTargetPath() != target {
				continue
			}
			if s != here {
				return nil, fmt.Errorf("what is published at %s is in sandbox %q, not in %q", target, s.GetSandboxId(), id)
			}
			return v, nil
		}
	}
	if here == nil {
		return nil, fmt.Errorf("no sandbox %q: %w", id, errNothing)
	}
	return nil, fmt.Errorf("sandbox %q has nothing at %s: %w", id, target, errNothing)
}

var errNothing = errors.New("nothing is published there (crustctl sandbox list)")

// runDir is the directory for the sockets of a microVM that this command started.
func runDir(base, id string) string { return filepath.Join(base, id) }

// bootTime is the --timeout of `sandbox run`. An emulated guest boots within seconds, and within minutes on a machine that is busy.
const bootTime = 10 * time.Minute

// booted waits until a program runs in the guest. crustd bounds each of its calls (--timeout), and a boot may take longer than that.
func booted(ctx context.Context, run func() error, still func()) error {
	for {
		err := run()
		if status.Code(err) != codes.DeadlineExceeded || ctx.Err() != nil {
			return err
		}
		still()
	}
}

func sandboxRun(g *globals) *cobra.Command {
	var m microvm.Config
	var base, kind, userns string
	var pid int64
	c := &cobra.Command{
		Use: "run ID", Short: "Boot a microVM (or make a mount namespace) and register it", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id := args[0]
			if !cmd.Flags().Changed("timeout") {
				g.timeout = bootTime
			}
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				req := &crustv1alpha1.RegisterSandboxRequest{SandboxId: id, Pid: pid}
				if kind == "namespace" {
					req.Kind = &crustv1alpha1.RegisterSandboxRequest_Namespace{
						Namespace: &crustv1alpha1.NamespaceSandbox{UserNamespace: userns}}
					if _, err := c.RegisterSandbox(ctx, req); err != nil {
						return err
					}
					return g.done(cmd, "registered", id, "a mount namespace")
				}
				m.Dir = runDir(base, id)
				if _, err := os.Stat(m.Dir); err == nil {
					return fmt.Errorf("%s exists: `crustctl sandbox rm %s --run-dir %s` first", m.Dir, id, base)
				}
				for _, file := range []string{m.Kernel, m.Initrd} {
					if _, err := os.Stat(file); err != nil {
						return fmt.Errorf("%w; `make guest` builds them in .cache/guest: give --kernel and --initramfs (for a mount namespace: --kind namespace)", err)
					}
				}
				choice, err := microvm.Choose(ctx, m)
				if err != nil {
					return err
				}
				if choice.Why != "" {
					fmt.Fprintln(cmd.ErrOrStderr(), "crustctl:", choice.Why)
				}
				m.Accel = choice.Accel
				begin := time.Now()
				vm, err := microvm.Start(ctx, m)
				if err != nil {
					return errors.Join(err, removeRun(m.Dir))
				}
				if err := vm.Save(m.Dir); err != nil {
					vm.Kill()
					return err
				}
				magic, err := hex.DecodeString(vm.Magic)
				if err != nil {
					return err
				}
				req.Pid = int64(vm.PID)
				req.Kind = &crustv1alpha1.RegisterSandboxRequest_Qemu{Qemu: &crustv1alpha1.QemuSandbox{
					QmpSocket: vm.QMP, ChannelSocket: vm.Channel, ChannelMagic: magic}}
				_, err = c.RegisterSandbox(ctx, req)
				if err == nil {
					err = booted(ctx, func() error {
						_, err := c.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: id, Argv: []string{"/bin/true"}})
						return err
					}, func() {
						fmt.Fprintf(cmd.ErrOrStderr(), "crustctl: after %.0f s the guest still boots; its console is in %s\n",
							time.Since(begin).Seconds(), vm.Console)
					})
				}
				if err != nil {
					vm.Kill()
					return errors.Join(fmt.Errorf("%w%s", err, lastWords(vm.Console)), removeRun(m.Dir))
				}
				return g.done(cmd, fmt.Sprintf("running (%s, pid %d)", vm.Accel, vm.PID), id,
					fmt.Sprintf("up after %.1f s, console in %s", time.Since(begin).Seconds(), vm.Console))
			})
		},
	}
	f := c.Flags()
	f.StringVar(&kind, "kind", "qemu", "qemu or namespace; the server's --backend")
	f.StringVar(&m.Kernel, "kernel", "/var/lib/crust/guest/vmlinuz", "kernel of the guest")
	f.StringVar(&m.Initrd, "initramfs", "/var/lib/crust/guest/initramfs", "its initramfs, with crust-guest as /init")
	f.StringVar(&m.Machine, "machine", "q35", "q35 or microvm")
	f.StringVar(&m.Accel, "accel", "", "kvm, tcg (emulation), or auto: KVM if a guest has answered under it since this machine started (default $"+microvm.AccelVariable+", or else auto)")
	f.StringVar(&m.Memory, "memory", "512M", "memory of the guest")
	f.StringVar(&base, "run-dir", "/run/crust/sandboxes", "directory of the guests' sockets")
	f.Int64Var(&pid, "pid", 0, "namespace: a process whose end ends the sandbox")
	f.StringVar(&userns, "user-namespace", "", "namespace: the user namespace whose ids files are shown in, /proc/PID/ns/user")
	return c
}

// removeRun removes a microVM's files from its directory.
func removeRun(dir string) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, n := range names {
		errs = append(errs, os.Remove(filepath.Join(dir, n.Name())))
	}
	return errors.Join(append(errs, os.Remove(dir))...)
}

func sandboxList(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List sandboxes and their volumes", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
				if err != nil {
					return err
				}
				pods := g.podsByTarget(ctx)
				t := table{head: []string{"SANDBOX", "KIND", "PID", "DEVICE", "TYPE", "STATE", "INSIDE", "POD OR TARGET"}}
				for _, s := range r.GetSandboxes() {
					pid := "-"
					if s.GetPid() != 0 {
						pid = fmt.Sprint(s.GetPid())
					}
					row := []string{s.GetSandboxId(), s.GetKind(), pid}
					if len(s.GetVolumes()) == 0 {
						t.rows = append(t.rows, append(row, "-", "-", "ready", "-", "-"))
					}
					for _, v := range s.GetVolumes() {
						user := cmp.Or(pods[v.GetHostTargetPath()], v.GetHostTargetPath())
						t.rows = append(t.rows, append(append([]string{}, row...), v.GetHostVolumeId(), v.GetFileSystem(), v.GetState(),
							inside(v), user))
					}
				}
				return g.print(cmd.OutOrStdout(), t, r.GetSandboxes())
			})
		},
	}
}

func inside(v *crustv1alpha1.Volume) string {
	if v.GetSandboxDevice() == "" {
		return "-"
	}
	return v.GetSandboxDevice() + " at " + v.GetSandboxPath()
}

func sandboxExec(g *globals) *cobra.Command {
	c := &cobra.Command{
		Use:   "exec ID PROGRAM [ARG...]",
		Short: "Run a program in a microVM (into a namespace leads nsenter)",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[1] == "--" && len(args) > 2 {
				args = append(args[:1:1], args[2:]...)
			}
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				r, err := c.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: args[0], Argv: args[1:]})
				if err != nil {
					return err
				}
				if _, err := cmd.OutOrStdout().Write(r.GetOutput()); err != nil {
					return err
				}
				if r.GetExitCode() != 0 {
					return fmt.Errorf("%s: exit status %d", args[1], r.GetExitCode())
				}
				return nil
			})
		},
	}
	c.Flags().SetInterspersed(false) // the program's flags are not ours
	return c
}

func sandboxRemove(g *globals) *cobra.Command {
	var base string
	c := &cobra.Command{
		Use:   "rm ID",
		Short: "Take a sandbox's volumes away, deregister it, and end its microVM if `sandbox run` started it",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
				dir := runDir(base, args[0])
				_, here, err := sandboxes(ctx, c, args[0])
				if err != nil {
					return err
				}
				vm, verr := microvm.Load(dir)
				if here == nil && verr != nil {
					return fmt.Errorf("no sandbox %q is registered, and nothing is in %s (%w)", args[0], dir, verr)
				}
				if _, err := c.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: args[0]}); err != nil {
					return err
				}
				if verr != nil && here.GetKind() == "qemu" {
					return fmt.Errorf("sandbox %s is deregistered, but its QEMU (pid %d) was not found in %s: give the --run-dir of `sandbox run`, or "+
						"end it with `kill %d`", args[0], here.GetPid(), dir, here.GetPid())
				}
				if verr == nil {
					vm.Kill()
					deadline := time.Now().Add(10 * time.Second)
					for ; vm.Alive() && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
					}
					if err := removeRun(dir); err != nil {
						return err
					}
				}
				return g.done(cmd, "removed", args[0], "")
			})
		},
	}
	c.Flags().StringVar(&base, "run-dir", "/run/crust/sandboxes", "directory of the guests' sockets")
	return c
}
