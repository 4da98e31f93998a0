// Command crust-agent is the kubelet's half of CRUST, for kubelets without it. It sits between the
// kubelet and a CSI driver, and is an NRI plugin of the container runtime. See
// docs/crust-on-kubernetes.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/apiserver"
	"github.com/crust-csi/crust-csi/internal/daemon"
	"github.com/crust-csi/crust-csi/internal/privatesocket"
	"github.com/crust-csi/crust-csi/internal/registration"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/statedir"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/orchestrator"
	"github.com/crust-csi/crust-csi/pkg/orchestrator/nri"
)

type options struct {
	daemon.Flags

	driver, endpoint, registration, nri, node, kubeconfig, stateDir string
}

func main() { daemon.Main("crust-agent", run) }

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("crust-agent", flag.ContinueOnError)
	f.StringVar(&o.driver, "driver", "unix:///var/lib/kubelet/plugins/csi.crust.dev/csi.sock",
		"the CSI driver's own socket; the driver must not register itself with the kubelet")
	f.StringVar(&o.endpoint, "endpoint", "unix:///var/lib/kubelet/plugins/csi.crust.dev/agent.sock",
		"socket to serve CSI on; the kubelet must see its path as it is written")
	f.StringVar(&o.registration, "kubelet-registration-dir", "/var/lib/kubelet/plugins_registry", "the kubelet's directory of plugins")
	f.StringVar(&o.nri, "nri-socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	f.StringVar(&o.node, "node-name", os.Getenv("NODE_NAME"), "name of this node")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod does)")
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/crust-agent", "directory of what the agent has to remember")
	o.AddMetrics(f)
	o.AddTo(f, "0 errors, 2 what is done, 4 more")
	if err := f.Parse(args); err != nil || o.Version {
		return o, err
	}
	switch {
	case o.node == "":
		return nil, errors.New("give --node-name, or set NODE_NAME")
	case o.driver == o.endpoint:
		return nil, errors.New("--driver and --endpoint are the same socket")
	case !filepath.IsAbs(o.stateDir):
		return nil, fmt.Errorf("--state-dir %q is no absolute path", o.stateDir)
	}
	return o, o.Check(f.Args())
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
	log := rpcserver.Logger(os.Stderr, o.LogFormat, o.Verbosity)
	traces := otlp.Start("crust-agent", version.String(), log)
	defer traces.Stop()
	log = traces.Logger(log)
	lock, err := statedir.Lock(o.stateDir, "crust-agent")
	if err != nil {
		return err
	}
	defer lock.Close()
	servers := daemon.NewServers(log)
	defer servers.Close()
	ctx := servers.Context
	config, err := apiserver.Config(o.kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 50, 100 // the default of 5/s delays the pods of a node that has just started
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	boot, err := mounter.BootID()
	if err != nil {
		return err
	}
	records, err := orchestrator.LoadRecords(filepath.Join(o.stateDir, "deferrals"), boot)
	if err != nil {
		return fmt.Errorf("--state-dir: %w", err)
	}
	for _, err := range records.Bad() {
		log.Error("a record cannot be used; everything else goes on without it", "error", err)
	}
	conn, err := orchestrator.Dial(o.driver, traces.Client()...)
	if err != nil {
		return fmt.Errorf("--driver: %w", err)
	}
	defer func() { _ = conn.Close() }()
	events := record.NewBroadcaster(record.WithContext(ctx))
	defer events.Shutdown()
	events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	metrics := telemetry.New(version.String())
	metrics.ExpectDeferrals()
	agent, err := orchestrator.New(orchestrator.Config{
		Driver: conn, Pods: orchestrator.WatchPods(ctx, client, o.node), Records: records, Log: log, Count: metrics.Deferral,
		Events: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "crust-agent", Host: o.node}),
		Tracer: traces.Tracer(), DialOptions: traces.Client(),
	})
	if err != nil {
		return err
	}
	log.Info("starting", "version", version.String(), "driver", o.driver, "node", o.node)
	return errors.Join(serve(servers, o, log, metrics, agent, conn, traces.Server()), agent.Close())
}

// driverName waits until the driver responds, and returns its name.
func driverName(ctx context.Context, log *slog.Logger, conn grpc.ClientConnInterface) (name string, err error) {
	err = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		r, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		if err != nil {
			log.Info("waiting for the driver", "error", err)
		}
		name = r.GetName()
		return err == nil, nil
	})
	return name, err
}

// register registers the agent with the kubelet, after a driver that had registered itself is gone.
func register(ctx context.Context, o *options, name string, log *slog.Logger) (r *registration.Server, err error) {
	err = wait.PollUntilContextCancel(ctx, 2*time.Second, true, func(context.Context) (bool, error) {
		var err error
		if r, err = registration.Serve(o.registration, name, o.endpoint, log); err != nil {
			log.Warn("not registered with the kubelet yet; a driver must not register itself beside the agent", "error", err)
		}
		return err == nil, nil
	})
	return r, err
}

// observe counts forwarded calls.
func observe(metrics *telemetry.Metrics) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ended := metrics.Started(filepath.Base(info.FullMethod))
		err := handler(srv, stream)
		ended(status.Code(err).String())
		return err
	}
}

func serve(
	servers *daemon.Servers, o *options, log *slog.Logger, metrics *telemetry.Metrics, agent *orchestrator.Agent,
	conn grpc.ClientConnInterface, options []grpc.ServerOption,
) error {

	ctx := servers.Context
	var connection atomic.Pointer[error]
	notYet := errors.New("NRI is not connected yet")
	connection.Store(&notYet)
	var registered atomic.Pointer[registration.Server]
	ready := func() error {
		if r := registered.Load(); r != nil {
			return errors.Join(*connection.Load(), r.Err())
		}
		return errors.Join(*connection.Load(), errors.New("not registered with the kubelet yet"))
	}
	if err := servers.HTTP(o.MetricsAddress, metrics.Handler(ready)); err != nil {
		return err
	}
	go nri.New(agent).Serve(ctx, o.nri, func(err error) { connection.Store(&err) })
	// The waits fail only when ctx ends: the daemon was told to stop, or a server failed.
	name, err := driverName(ctx, log, conn)
	if err != nil {
		return servers.Err()
	}
	l, err := privatesocket.Listen(o.endpoint, 0o600)
	if err != nil {
		return err
	}
	servers.GRPC(agent.Proxy().Server(append(options, grpc.StreamInterceptor(observe(metrics)))...), l)
	// The kubelet may know the endpoint from before, so there may be calls in flight whether this succeeds or not.
	if r, err := register(ctx, o, name, log); err == nil {
		registered.Store(r)
		defer r.Stop()
		servers.Needs(r.Socket())
		log.Info("serving", "endpoint", o.endpoint, "driver_name", name)
		go agent.Sweep(ctx)
	}
	return servers.Wait("calls in flight are finished, what is published stays so")
}
