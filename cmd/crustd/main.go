// Command crustd is a CRUST server: it mounts volumes inside sandboxes, for an orchestrator that
// deferred them. See docs/sandboxes.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/statedir"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/namespace"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/qemu"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

type options struct {
	endpoint, backend, stateDir, kubeletDir, metricsAddress, logFormat string

	hostNamespace, installDir, capabilities string

	allow     []string
	uids      []uint32
	timeout   time.Duration
	ownership time.Duration
	verbosity int
	version   bool
}

// backends maps each kind of sandbox to the function that opens its backend.
var backends = map[string]func(o *options, log *slog.Logger) (sandbox.Backend, error){
	"namespace": func(o *options, _ *slog.Logger) (sandbox.Backend, error) {
		return namespace.New(o.stateDir, o.kubeletDir)
	},
	"qemu": func(o *options, log *slog.Logger) (sandbox.Backend, error) {
		return qemu.New(filepath.Join(o.stateDir, "qemu"), log)
	},
}

func kinds() string { return strings.Join(slices.Sorted(maps.Keys(backends)), " or ") }

func main() {
	if err := run(os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "crustd:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("crustd", flag.ContinueOnError)
	f.StringVar(&o.endpoint, "endpoint", "unix:///run/crust/crust.sock", "socket to serve CRUST on; only root, and who --allow-uid names, can connect")
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
	f.StringVar(&o.capabilities, "capabilities", privilege.Sandboxes.List(),
		"capabilities that are kept; all others are given back at the start. all: keep every one")
	f.StringVar(&o.metricsAddress, "metrics-address", "",
		"HOST:PORT of /metrics, /healthz and /readyz; without HOST this machine only, * for every interface (default: off)")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	f.IntVar(&o.verbosity, "v", 2, "log verbosity: 0 errors, 2 one line a call, 4 quiet calls too, 5 whole requests (without secrets)")
	f.BoolVar(&o.version, "version", false, "print the version and exit")
	if err := f.Parse(args); err != nil || o.version {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case len(o.allow) == 0:
		return nil, errors.New(
			"give at least one --allow-device GLOB: no device is handed to sandboxes unless it is named (/dev/loop* for " +
				"csi-node's pools)")
	case backends[o.backend] == nil:
		return nil, fmt.Errorf("--backend %q: %s", o.backend, kinds())
	case o.logFormat != "text" && o.logFormat != "json":
		return nil, fmt.Errorf("--log-format %q: text or json", o.logFormat)
	}
	if err := privilege.Check(o.capabilities); err != nil {
		return nil, fmt.Errorf("--capabilities: %w", err)
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
	if o.version {
		fmt.Println(version.String())
		return nil
	}
	if err := privilege.Keep(o.capabilities); err != nil {
		return err
	}
	if o.hostNamespace != "" && os.Getenv(entered) == "" {
		return enterHost(o)
	}
	log := rpcserver.Logger(os.Stderr, o.logFormat, o.verbosity)
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
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, linux.SIGTERM)
	defer cancel()
	l, err := crust.Listen(o.endpoint, func(err error) { log.Warn("peer", "error", err) }, append([]uint32{0}, o.uids...)...)
	if err != nil {
		return err
	}
	defer l.Close()
	backend, err := backends[o.backend](o, log)
	if err != nil {
		return err
	}
	m, err := sandbox.New(ctx, sandbox.Config{
		StateDir: o.stateDir, KubeletDir: o.kubeletDir, Backend: backend,
		Devices: sandbox.Devices{Allow: o.allow, ToAllow: "; allow it with --allow-device",
			KubeletDir: o.kubeletDir},
		Log: log, Timeout: o.timeout, OwnershipTimeout: o.ownership,
	})
	if fault.Is(err, fault.State) {
		return fmt.Errorf("%w (--backend, --state-dir)", err)
	}
	if err != nil {
		return err
	}
	defer m.Stop()
	log.Info("starting", "version", version.String(), "backend", o.backend, "capabilities", fmt.Sprint(backend.Capabilities()))
	return serve(ctx, o, log, metrics, l, m, traces.Server())
}

func serve(
	ctx context.Context, o *options, log *slog.Logger, metrics *telemetry.Metrics, l net.Listener, m *sandbox.Manager,
	options []grpc.ServerOption,
) error {

	g := rpcserver.New(log, metrics, append(options, crust.Limits()...)...)
	(&sandbox.Server{Manager: m}).Serve(g)
	failed := make(chan error, 2)
	closeHTTP, err := rpcserver.ServeHTTP(o.metricsAddress, metrics.Handler(func() error { return nil }), failed)
	if err != nil {
		return err
	}
	defer closeHTTP()
	go func() { failed <- g.Serve(l) }()
	log.Info("serving", "endpoint", o.endpoint)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("stopping: calls in flight are finished, sandboxes go on")
	sctx, cancel := context.WithTimeout(context.Background(), rpcserver.StopTimeout)
	defer cancel()
	rpcserver.Stop(sctx, g)
	return nil
}
