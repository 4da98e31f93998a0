package orchestrator_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/orchestrator"
)

// somebodys is somebody else's driver.
type somebodys struct {
	csi.UnimplementedNodeServer
	csi.UnimplementedIdentityServer
}

func (somebodys) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "driver.example.com"}, nil
}

func (somebodys) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	fmt.Println("the driver publishes", r.GetVolumeId())
	return &csi.NodePublishVolumeResponse{}, nil
}

// A proxy before a driver handles one of its calls. Agent.Proxy is one that defers mounts.
func ExampleProxy() {
	dir, err := os.MkdirTemp("", "proxy")
	check(err)
	defer os.RemoveAll(dir)
	listen := func(name string) (l net.Listener, endpoint string) {
		path := filepath.Join(dir, name)
		l, err := net.Listen("unix", path)
		check(err)
		return l, "unix://" + path
	}
	behind, driver := listen("driver.sock")
	front, kubelet := listen("proxy.sock")
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, somebodys{})
	csi.RegisterNodeServer(server, somebodys{})
	go server.Serve(behind)
	defer server.Stop()

	conn, err := orchestrator.Dial(driver)
	check(err)
	defer conn.Close()
	proxy := &orchestrator.Proxy{Driver: conn, Handlers: map[string]orchestrator.Handler{
		csi.Node_NodePublishVolume_FullMethodName: func(ctx context.Context, raw []byte, next orchestrator.Call) ([]byte, error) {
			fmt.Println("the proxy has seen a publish")
			return next(ctx, raw)
		},
	}}
	forwards := proxy.Server()
	go forwards.Serve(front)
	defer forwards.Stop()

	caller, err := orchestrator.Dial(kubelet)
	check(err)
	defer caller.Close()
	ctx := context.Background()
	info, err := csi.NewIdentityClient(caller).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	check(err)
	fmt.Println(info.GetName())
	_, err = csi.NewNodeClient(caller).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "data"})
	check(err)
	// Output:
	// driver.example.com
	// the proxy has seen a publish
	// the driver publishes data
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
