package crusttest_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A runtime refuses the first publish.
func Example() {
	s := crusttest.New()
	failed := false
	s.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimePublishVolume" && !failed {
			failed = true
			return status.Error(codes.Unavailable, "the sandbox is booting")
		}
		return nil
	}
	client, stop, err := s.Client()
	if err != nil {
		panic(err)
	}
	defer stop()
	req := &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: "pod", HostVolumeId: "/dev/loop0",
		HostTargetPath: "/var/lib/kubelet/pods/pod/mount", FileSystem: "ext4"}
	for range 2 {
		_, err := client.RuntimePublishVolume(context.Background(), req)
		fmt.Println(status.Code(err))
	}
	fmt.Println(s.Published("pod", "/dev/loop0").GetFileSystem(), s.Calls())
	// Output:
	// Unavailable
	// OK
	// ext4 [RuntimePublishVolume RuntimePublishVolume]
}
