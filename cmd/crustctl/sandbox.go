package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/microvm"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func sandboxCommand(g *globals) *cobra.Command {
	c := &cobra.Command{Use: "sandbox", Short: "Start, look at and end sandboxes of a CRUST server (crustd)"}
	c.PersistentFlags().StringVar(&g.crust, "crust", "unix:///run/crust/crust.sock", "CRUST socket")
	c.AddCommand(sandboxRun(g), sandboxList(g), sandboxExec(g), sandboxRemove(g), sandboxPublish(g), sandboxUnpublish(g), sandboxExpand(g))
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
	return f(ctx, c)
}

// runDir is where a microVM that this command started has its sockets.
func runDir(base, id string) string { return filepath.Join(base, id) }

func sandboxRun(g *globals) *cobra.Command {
	var m microvm.Config
	var base, kind, userns string
	var pid int64
	c := &cobra.Command{Use: "run ID", Short: "Boot a microVM (or make a mount namespace) and register it", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		id := args[0]
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			req := &crustv1alpha1.RegisterSandboxRequest{SandboxId: id, Pid: pid}
			if kind == "namespace" {
				req.Kind = &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{UserNamespace: userns}}
				if _, err := c.RegisterSandbox(ctx, req); err != nil {
					return err
				}
				return g.done(cmd, "registered", id, "a mount namespace")
			}
			m.Dir = runDir(base, id)
			if _, err := os.Stat(m.Dir); err == nil {
				return fmt.Errorf("%s exists: `crustctl sandbox rm %s` first", m.Dir, id)
			}
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
			req.Kind = &crustv1alpha1.RegisterSandboxRequest_Qemu{Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: vm.QMP, ChannelSocket: vm.Channel, ChannelMagic: magic}}
			_, err = c.RegisterSandbox(ctx, req)
			if err == nil {
				_, err = c.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: id, Argv: []string{"/bin/true"}}) // it is up
			}
			if err != nil {
				vm.Kill()
				return errors.Join(err, removeRun(m.Dir))
			}
			return g.done(cmd, fmt.Sprintf("running (%s, pid %d)", vm.Accel, vm.PID), id, fmt.Sprintf("up after %.1f s, console in %s", time.Since(begin).Seconds(), vm.Console))
		})
	}}
	f := c.Flags()
	f.StringVar(&kind, "kind", "qemu", "qemu or namespace; the server's --backend")
	f.StringVar(&m.Kernel, "kernel", "/var/lib/crust/guest/vmlinuz", "kernel of the guest")
	f.StringVar(&m.Initrd, "initramfs", "/var/lib/crust/guest/initramfs", "its initramfs, with crust-guest as /init")
	f.StringVar(&m.Machine, "machine", "q35", "q35 or microvm")
	f.StringVar(&m.Accel, "accel", "auto", "kvm, tcg (emulation), or auto: kvm where it really works")
	f.StringVar(&m.Memory, "memory", "512M", "memory of the guest")
	f.StringVar(&base, "run-dir", "/run/crust/sandboxes", "directory of the guests' sockets")
	f.Int64Var(&pid, "pid", 0, "namespace: a process whose end ends the sandbox")
	f.StringVar(&userns, "user-namespace", "", "namespace: the user namespace whose ids files are shown in, /proc/PID/ns/user")
	return c
}

// removeRun removes what a microVM had in its directory.
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
	return &cobra.Command{Use: "list", Short: "List sandboxes and their volumes", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
			if err != nil {
				return err
			}
			t := table{head: []string{"SANDBOX", "KIND", "PID", "VOLUME", "TYPE", "STATE", "INSIDE", "HOST TARGET"}}
			for _, s := range r.GetSandboxes() {
				row := []string{s.GetSandboxId(), s.GetKind(), fmt.Sprint(s.GetPid())}
				if len(s.GetVolumes()) == 0 {
					t.rows = append(t.rows, append(row, "", "", "", "", ""))
				}
				for _, v := range s.GetVolumes() {
					t.rows = append(t.rows, append(append([]string{}, row...), v.GetHostVolumeId(), v.GetFileSystem(), v.GetState(), v.GetSandboxDevice()+" at "+v.GetSandboxPath(), v.GetHostTargetPath()))
				}
			}
			return g.print(cmd.OutOrStdout(), t, r.GetSandboxes())
		})
	}}
}

func sandboxExec(g *globals) *cobra.Command {
	c := &cobra.Command{Use: "exec ID PROGRAM [ARG...]", Short: "Run a program in a microVM", Args: cobra.MinimumNArgs(2), RunE: func(cmd *cobra.Command, args []string) error {
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
	}}
	c.Flags().SetInterspersed(false) // the program's own flags are its own
	return c
}

func sandboxRemove(g *globals) *cobra.Command {
	var base string
	c := &cobra.Command{Use: "rm ID", Short: "Take a sandbox's volumes away, deregister it, and end its microVM if `sandbox run` started it", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			if _, err := c.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: args[0]}); err != nil {
				return err
			}
			dir := runDir(base, args[0])
			if vm, err := microvm.Load(dir); err == nil {
				vm.Kill()
				for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
					if _, err := os.Stat(fmt.Sprintf("/proc/%d", vm.PID)); err != nil {
						break
					}
				}
				if err := removeRun(dir); err != nil {
					return err
				}
			}
			return g.done(cmd, "removed", args[0], "")
		})
	}}
	c.Flags().StringVar(&base, "run-dir", "/run/crust/sandboxes", "directory of the guests' sockets")
	return c
}

// sandboxPublish does what an orchestrator does with a volume that may be
// deferred: asks the runtime, publishes on the node, and then in the sandbox.
func sandboxPublish(g *globals) *cobra.Command {
	var u useFlags
	var readOnly bool
	var group string
	c := &cobra.Command{Use: "publish ID VOLUME TARGET", Short: "Stage a volume and publish it to a sandbox, as a kubelet of KEP-2857 would", Args: cobra.ExactArgs(3), RunE: func(cmd *cobra.Command, args []string) error {
		v, err := u.volume(args[1])
		if err != nil {
			return err
		}
		v.Context = map[string]string{"allowRuntimeAssistedMount": "true"}
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			info, err := g.deferred(cmd, c, v, args[2], readOnly)
			if err != nil {
				return err
			}
			req := &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: args[0], HostVolumeId: info.Source, HostTargetPath: args[2], FileSystem: info.Type}
			for k, value := range info.Options {
				req.MountOptions = append(req.MountOptions, strings.TrimSuffix(k+"="+value, "="))
			}
			if group != "" {
				var gid uint32
				if _, err := fmt.Sscan(group, &gid); err != nil {
					return fmt.Errorf("--group %q: a number", group)
				}
				req.FsgroupGid = &gid
			}
			if _, err := c.RuntimePublishVolume(ctx, req); err != nil {
				return err
			}
			return g.done(cmd, "published in sandbox "+args[0], args[1], fmt.Sprintf("%s (%s)", info.Source, info.Type))
		})
	}}
	u.add(c)
	c.Flags().BoolVar(&readOnly, "read-only", false, "publish read-only")
	c.Flags().StringVar(&group, "group", "", "the pod's fsGroup, a number")
	return c
}

func sandboxUnpublish(g *globals) *cobra.Command {
	return &cobra.Command{Use: "unpublish ID VOLUME TARGET", Short: "Take a volume away from a sandbox and unstage it", Args: cobra.ExactArgs(3), RunE: func(cmd *cobra.Command, args []string) error {
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			list, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
			if err != nil {
				return err
			}
			for _, s := range list.GetSandboxes() {
				for _, v := range s.GetVolumes() {
					if s.GetSandboxId() != args[0] || v.GetHostTargetPath() != args[2] {
						continue
					}
					if _, err := c.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: args[0], HostVolumeId: v.GetHostVolumeId()}); err != nil {
						return err
					}
				}
			}
			return g.undefer(cmd, args[1], args[2])
		})
	}}
}

func sandboxExpand(g *globals) *cobra.Command {
	return &cobra.Command{Use: "expand ID VOLUME TARGET SIZE", Short: "Grow a volume's device and its file system in a sandbox, while it is used", Args: cobra.ExactArgs(4), RunE: func(cmd *cobra.Command, args []string) error {
		n, err := parseSize(args[3])
		if err != nil {
			return err
		}
		return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
			source, err := g.expandDeferred(cmd, args[1], args[2], n)
			if err != nil {
				return err
			}
			r, err := c.RuntimeExpandVolume(ctx, &crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: args[0], HostVolumeId: source, RequiredBytes: n})
			if err != nil {
				return err
			}
			return g.done(cmd, "grown to "+size(r.GetCapacityBytes()), args[1], source)
		})
	}}
}
