// Command crust-agent is the kubelet's half of CRUST, for kubelets that do not
// have it: it stands between the kubelet and a CSI driver, and is a plugin of the
// container runtime (NRI). See docs/crust-on-kubernetes.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/registration"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/orchestrator"
)

// stopTimeout is how long calls in flight may take after SIGTERM.
const stopTimeout = 20 * time.Second

type options struct {
	driver, endpoint, registration, nri, node, kubeconfig, stateDir, metricsAddress, logFormat string

	verbosity int
	version   bool
}

func main() {
	if err := run(os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "crust-agent:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("crust-agent", flag.ContinueOnError)
	f.StringVar(&o.driver, "driver", "unix:///var/lib/kubelet/plugins/csi.crust.dev/csi.sock", "the CSI driver's own socket; the driver must not register itself with the kubelet")
	f.StringVar(&o.endpoint, "endpoint", "unix:///var/lib/kubelet/plugins/csi.crust.dev/agent.sock", "socket to serve CSI on; the kubelet must see its path as it is written")
	f.StringVar(&o.registration, "kubelet-registration-dir", "/var/lib/kubelet/plugins_registry", "the kubelet's directory of plugins")
	f.StringVar(&o.nri, "nri-socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	f.StringVar(&o.node, "node-name", os.Getenv("NODE_NAME"), "name of this node")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod does)")
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/crust-agent", "directory of what the agent has to remember")
	f.StringVar(&o.metricsAddress, "metrics-address", "", "HOST:PORT of /metrics, /healthz and /readyz (default: off)")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	f.IntVar(&o.verbosity, "v", 2, "log verbosity: 0 errors, 2 what is done, 4 more")
	f.BoolVar(&o.version, "version", false, "print the version and exit")
	if err := f.Parse(args); err != nil || o.version {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.node == "":
		return nil, errors.New("give --node-name, or set NODE_NAME")
	case o.driver == o.endpoint:
		return nil, errors.New("--driver and --endpoint are the same socket")
	case !filepath.IsAbs(o.stateDir):
		return nil, fmt.Errorf("--state-dir %q is no absolute path", o.stateDir)
	case o.logFormat != "text" && o.logFormat != "json":
		return nil, fmt.Errorf("--log-format %q: text or json", o.logFormat)
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
	log := rpcserver.Logger(os.Stderr, o.logFormat, o.verbosity)
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, linux.SIGTERM)
	defer cancel()
	config, err := rest.InClusterConfig()
	if o.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if err != nil {
		return fmt.Errorf("the API server: %w (outside of a cluster: give --kubeconfig)", err)
	}
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
	conn, err := grpc.NewClient(o.driver, append(orchestrator.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))...)
	if err != nil {
		return fmt.Errorf("--driver: %w", err)
	}
	defer conn.Close()
	events := record.NewBroadcaster(record.WithContext(ctx))
	defer events.Shutdown()
	events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	metrics := telemetry.New(version.String())
	agent := orchestrator.New(orchestrator.Config{
		Driver: conn, Pods: orchestrator.WatchPods(ctx, client, o.node), Records: records, Log: log, Count: metrics.Deferral,
		Events: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "crust-agent", Host: o.node}),
	})
	log.Info("starting", "version", version.String(), "driver", o.driver, "node", o.node)
	return errors.Join(serve(ctx, o, log, metrics, agent, conn), agent.Close())
}

// driverName waits until the driver is there.
func driverName(ctx context.Context, log *slog.Logger, conn grpc.ClientConnInterface) (string, error) {
	for {
		actx, cancel := context.WithTimeout(ctx, 5*time.Second)
		r, err := csi.NewIdentityClient(conn).GetPluginInfo(actx, &csi.GetPluginInfoRequest{})
		cancel()
		if err == nil {
			return r.GetName(), nil
		}
		log.Info("waiting for the driver", "error", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// register makes the agent known to the kubelet, once a driver that registered
// itself before has gone.
func register(ctx context.Context, o *options, name string, log *slog.Logger) (*registration.Server, error) {
	for {
		r, err := registration.Serve(o.registration, name, o.endpoint, log)
		if err == nil {
			return r, nil
		}
		log.Warn("not registered with the kubelet yet; the driver must not register itself beside the agent", "error", err)
		select {
		case <-time.After(2 * time.Second):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// observe counts the calls that are forwarded.
func observe(metrics *telemetry.Metrics) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ended := metrics.Started(filepath.Base(info.FullMethod))
		err := handler(srv, stream)
		ended(status.Code(err).String())
		return err
	}
}

func serve(ctx context.Context, o *options, log *slog.Logger, metrics *telemetry.Metrics, agent *orchestrator.Agent, conn grpc.ClientConnInterface) error {
	var nri atomic.Pointer[error]
	notYet := errors.New("NRI is not connected yet")
	nri.Store(&notYet)
	var registered atomic.Pointer[registration.Server]
	failed := make(chan error, 2)
	if o.metricsAddress != "" {
		l, err := net.Listen("tcp", o.metricsAddress)
		if err != nil {
			return fmt.Errorf("--metrics-address: %w", err)
		}
		h := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: metrics.Handler(func() error {
			err := *nri.Load()
			if r := registered.Load(); r != nil {
				err = errors.Join(err, r.Err())
			} else {
				err = errors.Join(err, errors.New("the driver does not answer yet"))
			}
			return err
		})}
		defer h.Close()
		go func() {
			if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				failed <- err
			}
		}()
	}
	go agent.ServeNRI(ctx, o.nri, func(err error) { nri.Store(&err) })
	name, err := driverName(ctx, log, conn)
	if err != nil {
		return nil // told to stop meanwhile
	}
	l, err := rpcserver.Listen(o.endpoint)
	if err != nil {
		return err
	}
	s := agent.Proxy().Server(grpc.StreamInterceptor(observe(metrics)))
	go func() { failed <- s.Serve(l) }()
	r, err := register(ctx, o, name, log)
	if err != nil {
		s.Stop()
		return nil // told to stop meanwhile
	}
	registered.Store(r)
	defer r.Stop()
	log.Info("serving", "endpoint", o.endpoint, "driver_name", name)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("stopping: calls in flight are finished, what is published stays so")
	stop(s)
	return nil
}

func stop(s *grpc.Server) {
	done := make(chan struct{})
	go func() { s.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-time.After(stopTimeout):
		s.Stop()
	}
}
