package driver_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// A whole CSI driver, whose volumes are files of one directory. A real one has directories that
// survive a restart, and the kubelet's directory as root.
func Example() {
	dir, remove := exampleDirectory()
	defer remove()
	root, err := mounter.OpenRoot(dir)
	check(err)
	defer root.Close()
	pool, err := looppool.Open(looppool.Options{Name: "files", Dir: dir + "/pool", NodesDir: dir + "/dev", Reserve: 1 << 20})
	check(err)
	defer pool.Close()
	volumes, err := volume.NewRegistry(nil, pool)
	check(err)
	d, err := driver.New(driver.Config{Name: "files.example.com", NodeID: "node-1", StateDir: dir + "/state", AppliesGroups: true,
		Root: root, Volumes: volumes})
	check(err)
	defer d.Drain(context.Background())

	s := grpc.NewServer(grpc.ChainUnaryInterceptor(faultgrpc.UnaryInterceptor)) // without it, every refusal has the code Unknown
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	l, err := net.Listen("unix", dir+"/csi.sock") // only root may enter that directory: CSI has no other protection
	check(err)
	go func() { check(s.Serve(l)) }()
	defer s.GracefulStop()

	// An orchestrator creates a volume, and must not publish it before it is staged.
	conn, err := grpc.NewClient("unix:"+dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	defer conn.Close()
	created, err := csi.NewControllerClient(conn).CreateVolume(context.Background(), exampleVolume)
	check(err)
	_, err = csi.NewNodeClient(conn).NodePublishVolume(context.Background(), &csi.NodePublishVolumeRequest{
		VolumeId: created.GetVolume().GetVolumeId(), TargetPath: dir + "/pod", StagingTargetPath: dir + "/staging",
		VolumeCapability: exampleVolume.GetVolumeCapabilities()[0]})
	fmt.Println(created.GetVolume().GetCapacityBytes(), status.Code(err))
	// Output:
	// 16777216 FailedPrecondition
}

var exampleVolume = &csi.CreateVolumeRequest{Name: "data", CapacityRange: &csi.CapacityRange{RequiredBytes: 16 << 20},
	VolumeCapabilities: []*csi.VolumeCapability{{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4", VolumeMountGroup: "2000"}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}}}

// exampleDirectory returns an empty directory, and what removes it with everything in it.
func exampleDirectory() (dir string, remove func()) {
	dir, err := os.MkdirTemp("", "driver-")
	check(err)
	return dir, func() {
		var all []string
		check(filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			all = append(all, path)
			return err
		}))
		for i := range all {
			check(os.Remove(all[len(all)-1-i]))
		}
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
