package crust

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// steps are the calls in a sandbox's life with a volume.
func (s *server) steps(p *pod, registration *crustv1alpha1.RegisterSandboxRequest) []func(context.Context) error {
	publish := func(ctx context.Context) error { _, err := s.Client.RuntimePublishVolume(ctx, p.request()); return err }
	return []func(context.Context) error{
		func(ctx context.Context) error { _, err := s.Client.RegisterSandbox(ctx, registration); return err },
		publish,
		func(ctx context.Context) error {
			_, err := s.Client.ResolveMount(ctx, &crustv1alpha1.ResolveMountRequest{SandboxId: p.name, Source: p.target + "/lost+found"})
			return err
		},
		func(ctx context.Context) error {
			_, err := s.Client.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
			return err
		},
		publish,
		func(ctx context.Context) error {
			_, err := s.Client.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: p.name})
			return err
		},
	}
}

// holder registers a pod's sandbox by a process that does nothing.
func (s *server) holder(p *pod) *crustv1alpha1.RegisterSandboxRequest {
	s.T.Helper()
	sleep := exec.Command("sleep", "3600")
	ok(s.T, sleep.Start())
	s.T.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	return &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: p.name, Pid: int64(sleep.Process.Pid),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{}},
	}
}

// switchable starts a server whose failpoints can be switched.
func switchable(t *testing.T) (*server, testnode.Failpoints) {
	t.Helper()
	s, points := newServer(t, "namespace", "failpoint"), testnode.NewFailpoints(t)
	s.Stop()
	s.Env = points.Env()
	s.Start()
	return s, points
}

// D06: each step fails in turn, in one process. The call returns an error, succeeds when repeated,
// and nothing is left in the end.
func TestD06_CrustdErrorAtEveryStep(t *testing.T) {
	s, at := switchable(t)
	for _, point := range failpoints(t, "../../pkg/crust") {
		t.Run(point, func(t *testing.T) {
			s.T = t
			v := s.Volume(point, "ext4")
			p := s.pod("pod-"+point, v)
			ok(t, s.nodePublish(p))
			hit := false
			for i, step := range s.steps(p, s.holder(p)) {
				at.Set(t, point, "error")
				err := step(ctxOf(t))
				at.Off(t)
				if err == nil {
					continue
				}
				hit = true
				if !strings.Contains(err.Error(), "injected") {
					t.Errorf("step %d: %v", i, err)
				}
				if err := step(ctxOf(t)); err != nil {
					t.Fatalf("step %d, repeated: %v", i, err)
				}
			}
			if !hit {
				t.Errorf("no call failed for the error at %s", point)
			}
			s.nodeUnpublish(p)
			s.Delete(v) // refused while anything is left
		})
	}
	s.T = t
}

// D06: each step hangs in turn. Meanwhile another sandbox lives its life, and a second call on the
// same one is answered. The hung call continues when it is released.
func TestD06_CrustdHungAtEveryStep(t *testing.T) {
	s, at := switchable(t)
	for _, point := range failpoints(t, "../../pkg/crust") {
		t.Run(point, func(t *testing.T) {
			s.T = t
			v, other := s.Volume(point, "ext4"), s.Volume("other-"+point, "ext4")
			p, q := s.pod("pod-"+point, v), s.pod("other-"+point, other)
			ok(t, s.nodePublish(p))
			ok(t, s.nodePublish(q))
			another := s.steps(q, s.holder(q))
			hit := false
			for i, step := range s.steps(p, s.holder(p)) {
				hung, ended := at.Hang(t, point, func() error { return step(ctxOf(t)) })
				if hung {
					hit = true
					if err := step(ctxOf(t)); status.Code(err) != codes.Aborted {
						t.Errorf("step %d: a second call while the first hangs: %v", i, err)
					}
					for j, step := range another {
						if err := step(ctxOf(t)); err != nil {
							t.Errorf("while step %d hangs at %s, step %d of another sandbox fails: %v", i, point, j, err)
						}
					}
				}
				at.Off(t)
				if err := <-ended; err != nil {
					t.Fatalf("step %d, which hung and went on: %v", i, err)
				}
			}
			if !hit {
				t.Errorf("no call came past %s", point)
			}
			for _, x := range []*pod{p, q} {
				s.nodeUnpublish(x)
			}
			s.Delete(v)
			s.Delete(other)
		})
	}
	s.T = t
}
