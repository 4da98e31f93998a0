// Command crustd is a CRUST server: it mounts volumes inside sandboxes, for an orchestrator that
// deferred them. See docs/sandboxes.md.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/daemon"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/statedir"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/namespace"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/qemu"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

type options struct {
	daemon.Flags

	endpoint, backend, stateDir, kubeletDir string
	hostNamespace, installDir, capabilities string
	guestDir, kataRuntime                   string

	kataFileSystems []string

	allow     []string
	uids      []uint32
	timeout   time.Duration
	ownership time.Duration
}

// backends maps each kind of sandbox to the function that opens its backend.
var backends = map[string]func(o *options, log *slog.Logger) (sandbox.Backend, error){
	"namespace": func(o *options, _ *slog.Logger) (sandbox.Backend, error) {
		return namespace.New(o.stateDir, o.kubeletDir)
	},
	"qemu": func(o *options, log *slog.Logger) (sandbox.Backend, error) {
		b, err := qemu.New(filepath.Join(o.stateDir, "qemu"), o.timeout, log)
		if err == nil && o.guestDir != "" {
			err = b.Know(filepath.Join(o.guestDir, guestFacts))
		}
		return b, err
	},
	"kata": func(o *options, _ *slog.Logger) (sandbox.Backend, error) {
		return kata.New(kata.Config{Runtime: o.kataRuntime, FileSystems: o.kataFileSystems})
	},
}

func kinds() string { return strings.Join(slices.Sorted(maps.Keys(backends)), " or ") }

func main() { daemon.Main("crustd", run) }

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("crustd", flag.ContinueOnError)
	f.StringVar(&o.endpoint, "endpoint", "unix:///run/crust/crust.sock", "socket to serve CRUST on; only root and the users of --allow-uid can connect")
	f.StringVar(&o.backend, "backend", "namespace", "kind of the sandboxes: "+kinds())
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/crust", "directory of what the server has to remember")
	f.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "directory below which every target path lies")
	f.Func("allow-device", "path or glob of block devices that may be handed to sandboxes, with DRIVER= before it for volumes of that CSI "+
		"driver only; repeatable", func(s string) error {
		_, _, err := sandbox.SplitAllowed(s)
		o.allow = append(o.allow, s)
		return err
	})
	f.Func("allow-uid", "user that may connect besides root; repeatable", func(s string) error {
		n, err := strconv.ParseUint(s, 10, 32)
		o.uids = append(o.uids, uint32(n))
		return err
	})
	f.DurationVar(&o.timeout, "timeout", 60*time.Second, "the longest that a sandbox may take for an answer")
	f.DurationVar(&o.ownership, "ownership-timeout", 10*time.Minute,
		"the longest that it may take to mount a volume whose files are given to a group")
	f.StringVar(&o.hostNamespace, "host-mount-namespace", "",
		"mount namespace to run in; for a container that shares the host's pids: /proc/1/ns/mnt (default: this process's own)")
	f.StringVar(&o.installDir, "install-dir", "/opt/crust/bin",
		"with --host-mount-namespace: directory there that this program, crust-oci and crustctl, from the directory that it is in, are copied to")
	f.StringVar(&o.guestDir, "guest-dir", "",
		"with --backend qemu: directory of the guest of pods in microVMs, whose "+guestFacts+" says what it can mount before one has run; "+
			"with --host-mount-namespace, the guest of the container's image is copied there (default: ask the first guest)")
	f.StringVar(&o.kataRuntime, "kata-runtime", "", "with --backend kata: the runtime of this node's Kata Containers, "+kata.Go+" or "+kata.Rust)
	f.Func("kata-file-systems", "with --backend kata: file systems that the kernel of Kata's guests can mount, separated by commas", func(s string) error {
		o.kataFileSystems = strings.Split(s, ",")
		return nil
	})
	f.StringVar(&o.capabilities, "capabilities", privilege.Sandboxes.List(),
		"capabilities that are kept; all others are given back at the start. all: keep every one")
	o.AddMetrics(f)
	o.AddTo(f, "0 errors, 2 one line a call, 4 quiet calls too, 5 whole requests (without secrets)")
	if err := f.Parse(args); err != nil || o.Version {
		return o, err
	}
	if err := o.Check(f.Args()); err != nil {
		return nil, err
	}
	switch {
	case len(o.allow) == 0:
		return nil, errors.New(
			"give at least one --allow-device GLOB: no device is handed to sandboxes unless it is named (/dev/loop* for " +
				"csi-node's pools)")
	case backends[o.backend] == nil:
		return nil, fmt.Errorf("--backend %q: %s", o.backend, kinds())
	}
	if err := privilege.Check(o.capabilities); err != nil {
		return nil, fmt.Errorf("--capabilities: %w", err)
	}
	if o.guestDir != "" && (o.backend != "qemu" || !filepath.IsAbs(o.guestDir)) {
		return nil, fmt.Errorf("--guest-dir %q: give an absolute path, and --backend qemu", o.guestDir)
	}
	if isKata := o.backend == "kata"; isKata != (o.kataRuntime != "") || isKata != (len(o.kataFileSystems) > 0) {
		return nil, errors.New("--backend kata, --kata-runtime and --kata-file-systems: give all three, or none")
	}
	for name, dir := range map[string]string{"--state-dir": o.stateDir, "--kubelet-dir": o.kubeletDir, "--install-dir": o.installDir} {
		if !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("%s %q is no absolute path", name, dir)
		}
	}
	return o, nil
}

func run(args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.Version {
		fmt.Println(version.String())
		return nil
	}
	if err := privilege.Keep(o.capabilities); err != nil {
		return err
	}
	log := rpcserver.Logger(os.Stderr, o.LogFormat, o.Verbosity)
	if o.hostNamespace != "" && os.Getenv(entered) == "" {
		return enterHost(o, log)
	}
	traces := otlp.Start("crustd", version.String(), log)
	defer traces.Stop()
	log = traces.Logger(log)
	metrics := telemetry.New(version.String())
	root, err := mounter.OpenRoot(o.kubeletDir)
	if err != nil {
		return fmt.Errorf("--kubelet-dir: %w; give the directory of this node's kubelet, or create it", err)
	}
	if err := root.Close(); err != nil {
		return err
	}
	// Before anything is touched: another server may be using the sandboxes.
	lock, err := statedir.Lock(o.stateDir, "crustd")
	if err != nil {
		return err
	}
	defer lock.Close()
	servers := daemon.NewServers(log)
	defer servers.Close()
	l, err := crust.Listen(o.endpoint, func(err error) { log.Warn("peer", "error", err) }, append([]uint32{0}, o.uids...)...)
	if err != nil {
		return err
	}
	defer l.Close()
	backend, err := backends[o.backend](o, log)
	if err != nil {
		return err
	}
	m, err := sandbox.New(servers.Context, sandbox.Config{
		StateDir: o.stateDir, KubeletDir: o.kubeletDir, Backend: backend,
		Devices: sandbox.Devices{Allow: o.allow, ToAllow: "; allow it with --allow-device"},
		Log:     log, Timeout: o.timeout, OwnershipTimeout: o.ownership,
	})
	if fault.Is(err, fault.State) {
		return fmt.Errorf("%w (--backend, --state-dir)", err)
	}
	if err != nil {
		return err
	}
	defer m.Stop()
	log.Info("starting", "version", version.String(), "backend", o.backend, "capabilities", fmt.Sprint(backend.Capabilities()))
	g := rpcserver.New(log, metrics, append(traces.Server(), crust.Limits()...)...)
	(&sandbox.Server{Manager: m}).RegisterServices(g)
	if err := servers.HTTP(o.MetricsAddress, metrics.Handler(func() error { return nil })); err != nil {
		return err
	}
	servers.GRPC(g, l)
	log.Info("serving", "endpoint", o.endpoint)
	return servers.Wait("calls in flight are finished, sandboxes go on")
}
