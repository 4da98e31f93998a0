package crust

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestA10_ABadRecordOfASandboxIsThatSandboxesAlone(t *testing.T) {
	s := newServer(t, "namespace", "")
	v, w := s.Volume("a", "ext4"), s.Volume("b", "ext4")
	p, q := s.pod("pod", v), s.pod("other", w)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	s.Stop()
	files, err := filepath.Glob(filepath.Join(s.StateDir(), "sandboxes", "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	good, err := os.ReadFile(files[0])
	ok(t, err)
	ok(t, os.WriteFile(files[0], nil, 0o600))
	s.Start()
	// Other sandboxes work.
	ok(t, s.nodePublish(q))
	s.namespace(q)
	ok(t, s.runtimePublish(q))
	// Its volume is given to nobody else, and nothing is taken from it.
	thief := s.pod("other", v)
	thief.info = p.info
	refused(t, s.runtimePublish(thief), codes.FailedPrecondition, p.info.Source, "in use")
	refused(t, s.runtimePublish(p), codes.FailedPrecondition, "pod", files[0], "end the sandbox")
	_, err = s.Client.DeregisterSandbox(ctxOf(t), &crustv1alpha1.DeregisterSandboxRequest{SandboxId: "pod"})
	refused(t, err, codes.FailedPrecondition, "pod", files[0])
	_, err = s.Client.RegisterSandbox(ctxOf(t), &crustv1alpha1.RegisterSandboxRequest{SandboxId: "pod", Pid: int64(sb.Cmd.Process.Pid),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{}}})
	refused(t, err, codes.FailedPrecondition, "pod", files[0])
	refused(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, p.target), codes.FailedPrecondition, "still mounted")
	s.deregister(q)
	s.nodeUnpublish(q)
	s.Stop()
	if b, err := os.ReadFile(files[0]); err != nil || len(b) > 0 {
		t.Errorf("the record was touched: %q %v", b, err)
	}
	ok(t, os.WriteFile(files[0], good, 0o600))
	s.Start()
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
	s.Delete(w)
}
