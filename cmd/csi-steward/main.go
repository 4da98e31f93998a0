// Command csi-steward does the driver's work that needs the API server and that no external sidecar
// does:
//
//	csi-steward cluster   one per cluster: sends each copy to the node that has its origin
//	csi-steward node      one per node: takes VolumeSnapshotContents that were made by hand
//	                      and whose snapshot is here, and writes events about volumes that
//	                      are not well
//	csi-steward node-labels   writes the labels of its node into a file, once, for
//	                      csi-node, which does not talk to the API server
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/adoption"
	"github.com/crust-csi/crust-csi/internal/announce"
	"github.com/crust-csi/crust-csi/internal/apiserver"
	"github.com/crust-csi/crust-csi/internal/daemon"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/placement"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/version"
)

type options struct {
	daemon.Flags

	role, driver, socket, node, output, kubeconfig string
	adopt                                          bool
}

func main() { daemon.Main("csi-steward", run) }

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("csi-steward", flag.ContinueOnError)
	f.StringVar(&o.driver, "driver-name", "csi.crust.dev", "name of the CSI driver")
	f.StringVar(&o.socket, "csi-address", "/csi/csi.sock", "the driver's socket (node)")
	f.StringVar(&o.node, "node-name", os.Getenv("NODE_NAME"), "name of this node (node, node-labels)")
	f.StringVar(&o.output, "output", "", "file to write the labels to, for csi-node's --node-labels (node-labels)")
	f.BoolVar(&o.adopt, "adopt", true,
		"take VolumeSnapshotContents that were made by hand (node); false where the cluster has no CRDs of snapshots")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod does)")
	o.AddTo(f, "0 errors, 2 what is done, 4 more")
	if len(args) > 0 && slices.Contains([]string{"cluster", "node", "node-labels"}, args[0]) {
		o.role, args = args[0], args[1:]
	}
	if err := f.Parse(args); err != nil || o.Version {
		return o, err
	}
	switch {
	case o.role == "" || f.NArg() > 0:
		return nil, errors.New("usage: csi-steward cluster|node|node-labels [flags]")
	case o.role != "cluster" && o.node == "":
		return nil, errors.New("give --node-name, or set NODE_NAME")
	case (o.role == "node-labels") != (o.output != ""):
		return nil, errors.New("--output FILE is for node-labels, which needs it")
	}
	return o, o.Check(nil)
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
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, linux.SIGTERM)
	defer cancel()
	config, err := apiserver.Config(o.kubeconfig)
	if err != nil {
		return err
	}
	if o.role == "cluster" {
		config.QPS, config.Burst = 50, 100 // the default of 5/s delays a restore of many volumes
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if o.role == "node-labels" {
		return writeLabels(ctx, client, o.node, o.output)
	}
	snapshots, err := snapshots.NewForConfig(config)
	if err != nil {
		return err
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	events := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "csi-steward", Host: o.node})
	log.Info("starting", "version", version.String(), "role", o.role, "driver", o.driver, "node", o.node)
	if o.role == "cluster" {
		err = placement.New(placement.Config{Client: client, Snapshots: snapshots, Driver: o.driver, Events: events, Log: log}).Run(ctx)
	} else {
		err = node(ctx, o, log, client, snapshots, events)
	}
	if ctx.Err() != nil {
		return nil // stopped on request
	}
	return err
}

func node(ctx context.Context, o *options, log *slog.Logger, client kubernetes.Interface, snapshots snapshots.Interface,
	events record.EventRecorder) error {
	conn, err := grpc.NewClient("unix://"+o.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"))
	if err != nil {
		return fmt.Errorf("--csi-address: %w", err)
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	go func() {
		if !o.adopt {
			<-ctx.Done()
			ended <- nil
			return
		}
		ended <- adoption.Run(ctx, adoption.Config{Snapshots: snapshots, Controller: csi.NewControllerClient(conn), Driver: o.driver,
			Node: o.node, Log: log})
	}()
	go func() {
		ended <- announce.New(announce.Config{Client: client, Inventory: inventory.NewInventoryClient(conn),
			Health: csi.NewNodeClient(conn),
			Events: events, Log: log}).Run(ctx)
	}()
	err = <-ended
	cancel()
	return errors.Join(err, <-ended)
}
