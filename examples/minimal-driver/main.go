// Command minimal-driver is a CSI driver built on the packages of Crust CSI, and on nothing that a module elsewhere
// could not import. Its volumes are files in a directory of the node, with ext4 on them. Start here if you write a driver
// of your own: docs/library.md says what each step is for.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

func main() {
	node := flag.String("node", "", "name of this node")
	socket := flag.String("socket", "/run/minimal-driver.sock", "where CSI is served")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "the directory that all targets lie in")
	pool := flag.String("pool", "/var/lib/minimal-driver", "the directory that has the volumes")
	flag.Parse()
	if err := run(*node, *socket, *kubelet, *pool); err != nil {
		fmt.Fprintln(os.Stderr, "minimal-driver:", err)
		os.Exit(1)
	}
}

func run(node, socket, kubelet, dir string) error {
	pool, err := looppool.Open(looppool.Options{Name: "pool", Dir: dir})
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
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	d := &driver{node: node, pool: pool, kubelet: root, programs: fsprogs.New(nil)}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(faultgrpc.UnaryInterceptor, d.oneAtATime))
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	return server.Serve(listener)
}
