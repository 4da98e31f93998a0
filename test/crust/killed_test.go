package crust

import (
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
	"testing"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// failpoints returns the failpoints of the code below a directory.
func failpoints(t *testing.T, dir string) []string {
	t.Helper()
	out := run(t, "grep", "-rhoE", `failpoint\.(Hit|Err)\("[a-z.]+"\)`, dir, "--include=*.go")
	var points []string
	for _, m := range regexp.MustCompile(`"([a-z.]+)"`).FindAllStringSubmatch(out, -1) {
		points = append(points, m[1])
	}
	slices.Sort(points)
	return slices.Compact(points)
}

// D06: the server is killed at each failpoint in turn. The call that died succeeds when repeated,
// and nothing is left in the end.
func TestD06_CrustdKilledAtEveryStep(t *testing.T) {
	s := newServer(t, "namespace", "failpoint")
	killedAtEveryStep(t, s, failpoints(t, "../../pkg/crust"), s.holder)
}

// D06: the same with a microVM, which keeps running while its server dies.
func TestD06_CrustdKilledAtEveryStepOfAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "failpoint")
	s.acquaint()
	var points []string
	for _, p := range failpoints(t, "../../pkg/crust/sandbox") {
		if !strings.HasPrefix(p, "namespace.") {
			points = append(points, p)
		}
	}
	vm := &pod{name: "vm"}
	m := s.boot(vm, "q35", "")
	s.deregister(vm)
	magic, err := hex.DecodeString(m.vm.Magic)
	ok(t, err)
	killedAtEveryStep(t, s, points, func(p *pod) *crustv1alpha1.RegisterSandboxRequest {
		return &crustv1alpha1.RegisterSandboxRequest{SandboxId: p.name, Pid: int64(m.vm.PID),
			Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{
				Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: m.vm.QMP, ChannelSocket: m.vm.Channel, ChannelMagic: magic}}}
	})
}

func killedAtEveryStep(t *testing.T, s *server, points []string, register func(*pod) *crustv1alpha1.RegisterSandboxRequest) {
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			s.T = t
			v := s.Volume(point, "ext4")
			p := s.pod("pod-"+point, v)
			ok(t, s.nodePublish(p))
			registration := register(p)
			s.Stop()
			s.Env = []string{"CRUST_FAILPOINT=" + point}
			s.Start()
			hit := false
			for _, step := range s.steps(p, registration) {
				err := step(ctxOf(t))
				if err == nil {
					continue
				}
				if werr := s.Cmd.Wait(); werr == nil || werr.Error() != "signal: killed" {
					t.Fatalf("the call failed (%v), but crustd was not killed: %v", err, werr)
				}
				hit = true
				s.Client.Close()
				s.Cmd, s.Env = nil, nil
				s.Start()
				if err := step(ctxOf(t)); err != nil {
					t.Fatalf("the repeated call fails: %v", err)
				}
			}
			if !hit {
				t.Errorf("no call came past %s", point)
			}
			s.Stop()
			s.Env = nil
			s.Start()
			s.nodeUnpublish(p)
			s.Delete(v) // refused while anything is left
		})
	}
	s.T = t
}
