package crusttest

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// An orchestrator that takes a volume out of its sandbox can give it to another.
func TestAVolumeMovesFromSandboxToSandbox(t *testing.T) {
	s := New()
	qemu, kata := &crustv1alpha1.RegisterSandboxRequest_Qemu{}, &crustv1alpha1.RegisterSandboxRequest_Kata{}
	for _, id := range []string{"b", "a"} {
		if _, err := s.RegisterSandbox(t.Context(), &crustv1alpha1.RegisterSandboxRequest{SandboxId: id, Pid: 1, Kind: qemu}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		again *crustv1alpha1.RegisterSandboxRequest
		want  codes.Code
	}{
		{&crustv1alpha1.RegisterSandboxRequest{SandboxId: "a", Pid: 1}, codes.OK},
		{&crustv1alpha1.RegisterSandboxRequest{SandboxId: "a", Pid: 2}, codes.AlreadyExists},
		{&crustv1alpha1.RegisterSandboxRequest{SandboxId: "a", Pid: 1, Kind: kata}, codes.AlreadyExists},
	} {
		if _, err := s.RegisterSandbox(t.Context(), c.again); status.Code(err) != c.want {
			t.Errorf("%v: %v", c.again, err)
		}
	}
	publish := func(sandbox string, want codes.Code) {
		t.Helper()
		r := &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: sandbox, HostVolumeId: "/dev/v"}
		_, err := s.RuntimePublishVolume(t.Context(), r)
		if status.Code(err) != want {
			t.Errorf("in %s: %v, want %s", sandbox, err, want)
		}
	}
	in := func(want string) {
		t.Helper()
		list, err := s.ListSandboxes(t.Context(), &crustv1alpha1.ListSandboxesRequest{})
		got := ""
		for _, b := range list.GetSandboxes() {
			got += b.GetSandboxId()
			for _, v := range b.GetVolumes() {
				got += ":" + v.GetHostVolumeId() + ":" + v.GetState()
			}
			got += " "
		}
		if err != nil || got != want {
			t.Errorf("%q %v, want %q", got, err, want)
		}
	}
	publish("a", codes.OK)
	publish("b", codes.FailedPrecondition)
	in("a:/dev/v:published b ")
	for range 2 {
		r := &crustv1alpha1.UnpublishVolumeRequest{SandboxId: "a", HostVolumeId: "/dev/v"}
		if _, err := s.UnpublishVolume(t.Context(), r); err != nil {
			t.Error(err)
		}
	}
	publish("b", codes.OK)
	in("a b:/dev/v:published ")
	if _, err := s.DeregisterSandbox(t.Context(), &crustv1alpha1.DeregisterSandboxRequest{SandboxId: "b"}); err != nil {
		t.Error(err)
	}
	publish("a", codes.OK)
	in("a:/dev/v:published ")
}
