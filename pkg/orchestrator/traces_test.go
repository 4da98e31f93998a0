package orchestrator

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/internal/tracing/collector"
	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
)

const (
	theirTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	theirSpan   = "00f067aa0ba902b7"
	traceparent = "00-" + theirTrace + "-" + theirSpan + "-01"
)

// traced is the context of a tracing kubelet.
func (r *rig) traced() context.Context {
	return metadata.AppendToOutgoingContext(r.ctx(), "traceparent", traceparent)
}

// tracedRig returns one that can defer, whose processes send to a collector.
func tracedRig(t *testing.T) (*rig, *collector.Collector) {
	t.Helper()
	c := collector.New(t)
	c.Use(t)
	start := func(service string) *otlp.Tracing {
		traces := otlp.Start(service, "v", slog.New(slog.DiscardHandler))
		t.Cleanup(traces.Stop)
		return traces
	}
	all := tracings{start("crust-agent"), start("csi-node"), start("crustd")}
	return newTracedRig(t, all, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...), c
}

// record returns the one deferral's record on disk.
func (r *rig) record() string {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.records, "*.json"))
	if err != nil || len(files) != 1 {
		r.t.Fatal(files, err)
	}
	b, err := os.ReadFile(files[0])
	ok(r.t, err)
	return string(b)
}

const nodePublish, runtimePublish = "csi.v1.Node/NodePublishVolume", "crust.v1alpha1.RuntimeAssistedStorageManagement/RuntimePublishVolume"

// A kubelet's trace continues in the driver, and later in the sandbox, even if the agent restarted
// in between. The driver and the runtime get the agent's span. No secret of the request enters the
// trace.
func TestTraces_OneFromTheKubeletToTheSandbox(t *testing.T) {
	r, c := tracedRig(t)
	const secret = "hunter2"
	req := request()
	req.Secrets = map[string]string{"key": secret}
	req.VolumeCapability.GetMount().MountFlags = []string{"password=" + secret}
	_, err := r.kubelet.NodePublishVolume(r.traced(), req)
	ok(t, err)
	handled := c.Below(t, theirSpan, "crust-agent", nodePublish)
	asked := c.Below(t, handled.ID, "crust-agent", nodePublish)
	driver := c.Below(t, asked.ID, "csi-node", nodePublish)
	a := handled.Attributes
	if a["csi.volume.id"] != "vol" || a["k8s.pod.name"] != "p" || a["k8s.namespace.name"] != "ns" || a["k8s.pod.uid"] != "u1" {
		t.Errorf("%v", a)
	}
	if got := r.driver.md.Get("traceparent"); len(got) != 1 || got[0] != "00-"+theirTrace+"-"+asked.ID+"-01" {
		t.Errorf("the driver was told %q", got)
	}
	if want := `"trace": "00-` + theirTrace + "-" + handled.ID + `-01"`; !strings.Contains(r.record(), want) {
		t.Errorf("the record has not %s:\n%s", want, r.record())
	}
	// The kubelet repeats itself; the volume belongs to the call that deferred it.
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	ok(t, r.agent.Records.Place(target, "sb", false)) // an agent got that far before it was killed
	r.agent.Records, err = LoadRecords(r.records, "boot")
	ok(t, err)
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	later := c.Below(t, handled.ID, "crust-agent", "publish in sandbox")
	told := c.Below(t, later.ID, "crust-agent", runtimePublish)
	runtime := c.Below(t, told.ID, "crustd", runtimePublish)
	if a := later.Attributes; later.Failed || a["csi.volume.id"] != "vol" || a["k8s.pod.uid"] != "u1" || a["crust.sandbox.id"] != "sb" {
		t.Errorf("%+v", later)
	}
	for _, s := range []collector.Span{handled, asked, driver, later, told, runtime} {
		if s.Trace != theirTrace {
			t.Errorf("%s of %s is in another trace", s.Name, s.Service)
		}
	}
	// A version that does not know the field can read the rest.
	if strings.Contains(r.record(), "trace") {
		t.Errorf("the record of a published volume:\n%s", r.record())
	}
	if c.Has(secret) {
		t.Error("a secret is in the trace")
	}
}

// A failed publish shows as failed at each step, without any text of why.
func TestTraces_WhatFails(t *testing.T) {
	r, c := tracedRig(t)
	_, err := r.kubelet.NodePublishVolume(r.traced(), request())
	ok(t, err)
	handled := c.Below(t, theirSpan, "crust-agent", nodePublish)
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimePublishVolume" {
			return status.Error(codes.FailedPrecondition, "the guest says \xff hunter2")
		}
		return nil
	}
	if err := r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}); err == nil {
		t.Error("it was to fail")
	}
	later := c.Below(t, handled.ID, "crust-agent", "publish in sandbox")
	told := c.Below(t, later.ID, "crust-agent", runtimePublish)
	for _, s := range []collector.Span{later, told, c.Below(t, told.ID, "crustd", runtimePublish)} {
		if !s.Failed || s.Words != "" {
			t.Errorf("%+v", s)
		}
	}
	r.driver.fail = status.Error(codes.FailedPrecondition, "in use")
	if _, err := r.kubelet.NodeUnpublishVolume(r.traced(),
		&csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target}); err == nil {
		t.Error("it was to fail")
	}
	if s := c.Below(t, theirSpan, "crust-agent", "csi.v1.Node/NodeUnpublishVolume"); !s.Failed || s.Attributes["csi.volume.id"] != "vol" {
		t.Errorf("%+v", s)
	}
}

// With tracing off, the agent changes no metadata, and records are what they were.
func TestTraces_OffChangesNothing(t *testing.T) {
	c := collector.New(t)
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if got := r.driver.md; len(got.Get("traceparent")) > 0 || len(got.Get("tracestate")) > 0 {
		t.Errorf("added: %v", got)
	}
	_, err = r.kubelet.NodePublishVolume(r.traced(), request())
	ok(t, err)
	if got := r.driver.md.Get("traceparent"); len(got) != 1 || got[0] != traceparent {
		t.Errorf("the driver was told %q", got)
	}
	if strings.Contains(r.record(), "trace") {
		t.Errorf("the record:\n%s", r.record())
	}
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	if n := c.Connections(); n != 0 {
		t.Errorf("%d connections", n)
	}
}

// What a kubelet does not sample is not sampled later. The agent's work for a published volume has
// a trace of its own.
func TestTraces_NotSampledAndLater(t *testing.T) {
	r, c := tracedRig(t)
	no := metadata.AppendToOutgoingContext(r.ctx(), "traceparent", "00-"+theirTrace+"-"+theirSpan+"-00")
	_, err := r.kubelet.NodePublishVolume(no, request())
	ok(t, err)
	sandbox := podSandbox{"sb", 1}
	ok(t, r.agent.publishAll(r.ctx(), "u1", sandbox))
	r.agent.refresh(target, sandbox)
	later := c.Below(t, "", "crust-agent", "look after published volume")
	c.Below(t, later.ID, "crust-agent", runtimePublish)
	for _, s := range c.Spans() {
		if s.Trace != later.Trace {
			t.Errorf("%+v", s)
		}
	}
}

// A record from before traces, or with an invalid one, is carried out in a trace of its own.
func TestTraces_ARecordWithoutATrace(t *testing.T) {
	for name, trace := range map[string]string{"none": "", "broken": "00-zz-\x00-01"} {
		t.Run(name, func(t *testing.T) {
			r, c := tracedRig(t)
			_, err := r.kubelet.NodePublishVolume(r.traced(), request())
			ok(t, err)
			d, _ := r.agent.Records.Get(target)
			d.Trace = trace
			ok(t, r.agent.Records.keep(d))
			r.agent.Records, err = LoadRecords(r.records, "boot")
			ok(t, err)
			ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
			if s := c.Below(t, "", "crust-agent", "publish in sandbox"); s.Trace == theirTrace || s.Trace == "" {
				t.Errorf("%+v", s)
			}
		})
	}
}
