package crust

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// D06: a registration failed because the directory of its record could not be synced. No caller knows of the sandbox, so the next crustd
// must not have it: it would refuse another registration of that id.
func TestD06_ASandboxThatFailedToRegisterDoesNotComeBack(t *testing.T) {
	s, at := switchable(t)
	p := s.pod("pod", s.Volume("a", "ext4"))
	at.Set(t, "record.renamed", "error")
	if _, err := s.Client.RegisterSandbox(ctxOf(t), s.holder(p)); err == nil {
		t.Error("registered")
	}
	at.Off(t)
	s.Restart()
	list, err := s.Client.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
	ok(t, err)
	if len(list.GetSandboxes()) > 0 {
		t.Errorf("after a restart there is %v", list.GetSandboxes())
	}
	s.Delete(p.v)
}

// D06: a publish failed because the directory of its record could not be synced, and its caller unpublishes the volume, as an orchestrator
// does for a pod that has ended. The next crustd has no such volume: its device would be that sandbox's until it ends.
func TestD06_APublishThatFailedIsEndedByAnUnpublish(t *testing.T) {
	s, at := switchable(t)
	p := s.pod("pod", s.Volume("a", "ext4"))
	ok(t, s.nodePublish(p))
	s.namespace(p)
	at.Set(t, "record.renamed", "error")
	if err := s.runtimePublish(p); err == nil {
		t.Error("published")
	}
	at.Off(t)
	_, err := s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	ok(t, err)
	s.Restart()
	list, err := s.Client.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
	ok(t, err)
	if len(list.GetSandboxes()) != 1 || len(list.GetSandboxes()[0].GetVolumes()) > 0 {
		t.Errorf("after a restart there is %v", list.GetSandboxes())
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(p.v)
}

// D06: crust-agent could not sync the directory of a deferral's record. It takes the deferral back, and the next agent does not carry it
// out: the host may have mounted the volume for the pod since.
func TestD06_ADeferralThatTheAgentTookBackDoesNotComeBack(t *testing.T) {
	a := testcrust.NewAgent(t, newServer(t, "namespace", "").Server, testnode.BuildCommand(t, "crust-agent", "failpoint"))
	v := a.S.Volume("a", "ext4")
	p := a.Tenant(t, "pa", v)
	a.At.Set(t, "record.renamed", "error")
	if err := p.Publish(ctxOf(t)); err == nil {
		t.Error("deferred")
	}
	a.At.Off(t)
	nothingLeft(t, a)
	ok(t, p.Unpublish(ctxOf(t)))
	a.S.Delete(v)
}
