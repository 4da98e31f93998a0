package orchestrator

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A runtime knows the kind of its sandboxes. One of v0.1.0 wants to be told, and an answer about the sandbox itself is not lost.
func TestC22_ARuntimeKnowsItsKind(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(named bool) error
		asked  []bool // whether the kind was named
		want   string // part of the error
	}{
		"of today": {func(bool) error { return nil }, []bool{false}, ""},
		"v0.1.0": {func(named bool) error {
			if !named {
				return status.Error(codes.InvalidArgument, `a sandbox of kind "": this server has the backend "namespace"`)
			}
			return nil
		}, []bool{false, true}, ""},
		"of another kind": {func(named bool) error {
			if named {
				return status.Error(codes.InvalidArgument, `a sandbox of kind "namespace": this server has the backend "qemu"`)
			}
			return status.Error(codes.InvalidArgument, `qmp_socket "": give an absolute path`)
		}, []bool{false, true}, "qmp_socket"},
		"v0.1.0 without the process": {func(named bool) error {
			if !named {
				return status.Error(codes.InvalidArgument, "the kind is missing")
			}
			return status.Error(codes.FailedPrecondition, "process 7 has ended")
		}, []bool{false, true}, "process 7 has ended"},
		"no management": {func(bool) error { return status.Error(codes.Unimplemented, "no") }, []bool{false}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
			var asked []bool
			r.manager.register = func(q *crustv1alpha1.RegisterSandboxRequest) error {
				if q.GetSandboxId() != "sb" || q.GetPid() != 7 {
					t.Errorf("%v", q)
				}
				asked = append(asked, q.GetKind() != nil)
				return c.answer(q.GetKind() != nil)
			}
			_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
			ok(t, err)
			d, _ := r.agent.Records.Get(target)
			err = r.agent.runtimes.register(r.ctx(), d, podSandbox{"sb", 7})
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if !slices.Equal(asked, c.asked) {
				t.Errorf("the kind was named: %v, want %v", asked, c.asked)
			}
		})
	}
}
