package crusttest_test

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// docs/runtime-authors.md: "One sandbox has a device, unless all have it read-only."
func TestR05_TheServerInMemoryHasSeveralReaders(t *testing.T) {
	s := crusttest.New()
	ask := func(id string, options ...string) codes.Code {
		_, err := s.RuntimePublishVolume(t.Context(), &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: id, HostVolumeId: "/dev/loop7",
			HostTargetPath: "/pods/" + id, FileSystem: "ext4", MountOptions: options})
		return status.Code(err)
	}
	if a, b, c := ask("a", "ro"), ask("b", "noatime", "ro"), ask("c"); a != codes.OK || b != codes.OK || c != codes.FailedPrecondition {
		t.Errorf("the first reader: %s, the second: %s, a writer: %s", a, b, c)
	}
}
