// Command minimal-driver is a CSI driver that imports only public packages of Crust CSI, so any
// other module could contain it. Its volumes are files in a directory of the node, with ext4 on
// them. Start here to write your own driver: docs/library.md explains each step.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
)

func main() {
	node := flag.String("node", "", "name of this node")
	socket := flag.String("socket", "/run/minimal-driver.sock", "where CSI is served")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "the directory that all targets lie in")
	pool := flag.String("pool", "/var/lib/minimal-driver/pool", "the directory that has the volumes")
	state := flag.String("state", "/var/lib/minimal-driver/state", "the directory of what the node knows of its pool")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *node, *socket, *kubelet, *pool, *state); err != nil {
		fmt.Fprintln(os.Stderr, "minimal-driver:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, node, socket, kubelet, dir, state string) error {
	// If the pool's disk is not mounted, its directory is not mistaken for an empty pool.
	pool, err := poolhome.Open(poolhome.Options{Name: "pool", Dir: dir, State: state, Empty: looppool.Empty,
		Open: func() (volume.Pool, error) {
			return looppool.Open(looppool.Options{Name: "pool", Dir: dir, NodesDir: filepath.Join(state, "dev")})
		}})
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Recover(func(volume.Source, string) error { return nil }); err != nil { // it freezes nothing
		return err
	}
	root, err := mounter.OpenRoot(kubelet)
	if err != nil {
		return err
	}
	defer root.Close()
	listener, err := crust.Listen("unix://"+socket, nil) // for root only; takes over the socket of a killed driver
	if err != nil {
		return err
	}
	d := &driver{node: node, pool: pool, kubelet: root, programs: fsprogs.New(nil)}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(faultgrpc.UnaryInterceptor, d.alone))
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	defer context.AfterFunc(ctx, server.GracefulStop)()
	return server.Serve(listener)
}
