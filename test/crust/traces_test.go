package crust

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/internal/tracing/collector"
)

const (
	theirTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	theirSpan  = "00f067aa0ba902b7"
)

// traced returns the context of a caller that traces.
func traced(t testing.TB) context.Context {
	return metadata.AppendToOutgoingContext(ctxOf(t), "traceparent", "00-"+theirTrace+"-"+theirSpan+"-01")
}

const runtimePublishing = "crust.v1alpha1.RuntimeAssistedStorageManagement/RuntimePublishVolume"

// starts starts a tenant's sandbox and its container, as a container runtime that tries again.
func starts(t testing.TB, p *testcrust.Tenant) {
	t.Helper()
	if err := p.Run(ctxOf(t)); err != nil { // on a busy machine it continues after the hook
		t.Log(err)
	}
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		err := p.Create(ctxOf(t))
		if err == nil {
			break
		}
		if time.Since(begin) > testcrust.Longest() {
			t.Fatal(err)
		}
	}
}

// The kubelet's request and the sandbox's mount are one trace across the real processes:
// crust-agent, csi-node and crustd.
func TestTraces_FromTheKubeletToTheSandbox(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	a := testcrust.NewAgent(t, newServer(t, "namespace", "").Server, testnode.BuildCommand(t, "crust-agent", ""))
	v := csiclient.Volume{FSType: "ext4", Context: map[string]string{"allowRuntimeAssistedMount": "true"}}
	made, err := a.S.Node.Client.Create(ctxOf(t), "traced", size, v, nil, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	t.Cleanup(func() { a.S.Delete(v) })
	ok(t, os.MkdirAll(a.Kubelet.StagingPath(v.ID), 0o750))
	ok(t, a.Kubelet.Stage(traced(t), v))
	p := a.Tenant(t, "pa", v)
	ok(t, p.Publish(traced(t)))
	starts(t, p)

	forwarded := func(method string) (handled, served collector.Span) {
		t.Helper()
		handled = c.Below(t, theirSpan, "crust-agent", method)
		served = c.Below(t, c.Below(t, handled.ID, "crust-agent", method).ID, "csi-node", method)
		return handled, served
	}
	_, staged := forwarded("csi.v1.Node/NodeStageVolume")
	c.Below(t, staged.ID, "csi-node", "attach device")
	if s := c.Below(t, staged.ID, "csi-node", "mkfs.ext4"); s.Failed || s.Trace != theirTrace {
		t.Errorf("%+v", s)
	}
	deferred, served := forwarded("csi.v1.Node/NodePublishVolume")
	if served.Attributes["csi.volume.id"] != v.ID || served.Attributes["k8s.pod.name"] != "pa" {
		t.Errorf("%+v", served)
	}
	later := c.Below(t, deferred.ID, "crust-agent", "publish in sandbox")
	told := c.Below(t, later.ID, "crust-agent", runtimePublishing)
	mounted := c.Below(t, c.Below(t, told.ID, "crustd", runtimePublishing).ID, "crustd", "mount")
	if mounted.Trace != theirTrace || mounted.Failed {
		t.Errorf("%+v", mounted)
	}
	files, err := filepath.Glob(filepath.Join(a.Dir, "state/deferrals/*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	record, err := os.ReadFile(files[0])
	ok(t, err)
	if strings.Contains(string(record), "trace") {
		t.Errorf("the record of a published volume:\n%s", record)
	}
	if !strings.Contains(a.S.Log.String(), "trace_id="+theirTrace) {
		t.Errorf("crustd's log does not name the trace:\n%s", a.S.Log)
	}
	ok(t, p.Stop(ctxOf(t)))
	ok(t, p.Unpublish(traced(t)))
	forwarded("csi.v1.Node/NodeUnpublishVolume")
}

// The trace includes the guest's part, although a guest has no network.
func TestTraces_FromTheCallerIntoTheGuest(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	group := uint32(3000)
	p.group = &group
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	_, err := s.Client.RuntimePublishVolume(traced(t), p.request())
	ok(t, err)
	served := c.Below(t, theirSpan, "crustd", runtimePublishing)
	plugged := c.Below(t, served.ID, "crustd", "plug in disk")
	asked := c.Below(t, served.ID, "crustd", "guest Mount")
	for _, name := range []string{"guest: wait for disk", "guest: mount", "guest: give files to group"} {
		if step := c.Below(t, asked.ID, "crustd", name); step.Trace != theirTrace || step.Begin.Before(plugged.End) ||
			step.End.After(asked.End) {
			t.Errorf("%+v", step)
		}
	}
	s.deregister(p)
	m.Kill()
	s.nodeUnpublish(p)
	s.Delete(v)
}

// One trace goes through all five programs: the kubelet's caller, crust-agent, csi-node, crustd and crust-guest. The pod runs in a
// microVM, whose runtime has registered it with crustd; the agent knows its id only.
func TestTraces_OneThroughAllPrograms(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	s := newServer(t, "qemu", "")
	s.acquaint()
	a := testcrust.NewAgent(t, s.Server, testnode.BuildCommand(t, "crust-agent", ""))
	v := csiclient.Volume{FSType: "xfs", Context: map[string]string{"allowRuntimeAssistedMount": "true"}}
	made, err := s.Node.Client.Create(ctxOf(t), "traced", 512<<20, v, nil, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	t.Cleanup(func() { s.Delete(v) })
	ok(t, os.MkdirAll(a.Kubelet.StagingPath(v.ID), 0o750))
	ok(t, a.Kubelet.Stage(traced(t), v))
	p := a.Tenant(t, "pa", v)
	ok(t, p.Publish(traced(t)))
	m := s.boot(&pod{name: p.Holder.ID}, "q35", "")
	starts(t, p)
	sh(t, m, "echo seen > %s/f && grep -q ' %s .* xfs ' /proc/self/mountinfo", m.Path(p.Target), m.Path(p.Target))

	const publish = "csi.v1.Node/NodePublishVolume"
	deferred := c.Below(t, theirSpan, "crust-agent", publish)
	c.Below(t, c.Below(t, deferred.ID, "crust-agent", publish).ID, "csi-node", publish)
	later := c.Below(t, deferred.ID, "crust-agent", "publish in sandbox")
	served := c.Below(t, c.Below(t, later.ID, "crust-agent", runtimePublishing).ID, "crustd", runtimePublishing)
	mounted := c.Below(t, c.Below(t, served.ID, "crustd", "guest Mount").ID, "crustd", "guest: mount")
	if mounted.Trace != theirTrace || mounted.Failed {
		t.Errorf("%+v", mounted)
	}
	ok(t, p.Stop(ctxOf(t)))
	m.Kill()
	ok(t, p.Unpublish(traced(t)))
	ok(t, a.Kubelet.Unstage(traced(t), v.ID))
}
