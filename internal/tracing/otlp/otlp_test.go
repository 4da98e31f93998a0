package otlp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/internal/tracing/collector"
)

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var silent = slog.New(slog.DiscardHandler)

// node fails, panics, or does something in steps.
type node struct {
	csi.UnimplementedNodeServer
	log *slog.Logger
	do  func(ctx context.Context) error
}

func (n *node) NodeStageVolume(ctx context.Context, _ *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	n.log.InfoContext(ctx, "staged")
	return &csi.NodeStageVolumeResponse{}, n.do(ctx)
}

func (n *node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func serve(t testing.TB, traces *Tracing, n *node) csi.NodeClient {
	t.Helper()
	s := grpc.NewServer(traces.Server()...)
	csi.RegisterNodeServer(s, n)
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	ok(t, err)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	c, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	ok(t, err)
	t.Cleanup(func() { c.Close() })
	return csi.NewNodeClient(c)
}

const (
	theirs = "4bf92f3577b34da6a3ce929d0e0e4736"
	caller = "00f067aa0ba902b7"
)

// called returns the context of a caller that is traced.
func called(t testing.TB) context.Context {
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+theirs+"-"+caller+"-01")
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestTraces_ACallAndItsSteps(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	var log bytes.Buffer
	traces := Start("csi-node", "v", slog.New(slog.NewTextHandler(&log, nil)))
	const secret = "hunter2"
	hostile := "vol\x1b[2J\xff" + strings.Repeat("x", 1000)
	n := &node{log: traces.Logger(slog.New(slog.NewTextHandler(&log, nil)).With("a", 1)), do: func(ctx context.Context) error {
		sctx, end := tracing.Begin(ctx, "mkfs.ext4", tracing.Volume(hostile))
		tracing.ExitCode(sctx, 7)
		tracing.Past(sctx, "measured", time.Unix(1, 0), time.Unix(2, 0))
		err := errors.New("option password=" + secret)
		end(err)
		return err
	}}
	client := serve(t, traces, n)
	req := &csi.NodeStageVolumeRequest{
		VolumeId: "vol", Secrets: map[string]string{"key": secret}, PublishContext: map[string]string{"x": secret},
		VolumeContext: map[string]string{"csi.storage.k8s.io/pod.name": "p", "csi.storage.k8s.io/pod.namespace": "ns", "token": secret},
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
			MountFlags: []string{"password=" + secret},
		}}},
	}
	if _, err := client.NodeStageVolume(called(t), req); err == nil {
		t.Error("it was to fail")
	}
	_, err := client.NodeGetCapabilities(called(t), &csi.NodeGetCapabilitiesRequest{})
	ok(t, err)
	traces.Stop() // and everything has arrived
	const method = "csi.v1.Node/NodeStageVolume"
	server := c.Below(t, caller, "csi-node", method)
	a := server.Attributes
	if a["csi.volume.id"] != "vol" || a["k8s.pod.name"] != "p" || a["k8s.namespace.name"] != "ns" {
		t.Errorf("%v", a)
	}
	if server.Trace != theirs || !server.Failed || a["rpc.response.status_code"] != "UNKNOWN" {
		t.Errorf("%+v", server)
	}
	step := c.Below(t, server.ID, "csi-node", "mkfs.ext4")
	id := step.Attributes["csi.volume.id"]
	if !step.Failed || step.Numbers["process.exit.code"] != 7 || !strings.HasPrefix(id, `vol\x1b[2J\xff`) || len(id) > 2*mostText {
		t.Errorf("%+v", step)
	}
	if m := c.Below(t, step.ID, "csi-node", "measured"); m.End.Sub(m.Begin) != time.Second {
		t.Errorf("%+v", m)
	}
	for _, s := range c.Spans() {
		if s.Words != "" || strings.HasSuffix(s.Name, "NodeGetCapabilities") || s.Trace != server.Trace {
			t.Errorf("%+v", s)
		}
	}
	if c.Has(secret) {
		t.Error("a secret is in the trace")
	}
	if !strings.Contains(log.String(), "a=1 trace_id="+server.Trace) {
		t.Errorf("the log does not name the trace:\n%s", &log)
	}
}

// A call that its caller does not sample makes no span, and a call from a caller without traces
// starts a trace. The parent call may have ended.
func TestTraces_TheCallerDecides(t *testing.T) {
	c := collector.New(t)
	c.Use(t)
	traces := Start("csi-node", "v", silent)
	var late context.Context
	client := serve(t, traces, &node{log: silent, do: func(ctx context.Context) error {
		late = context.WithoutCancel(ctx)
		_, end := tracing.Begin(ctx, "step")
		end(nil)
		return nil
	}})
	call := func(ctx context.Context) {
		t.Helper()
		_, err := client.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "vol"})
		ok(t, err)
	}
	call(metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+theirs+"-"+caller+"-00"))
	call(t.Context())
	_, end := tracing.Begin(late, "goes on without its caller")
	end(nil)
	traces.Stop()
	server := c.Below(t, "", "csi-node", "csi.v1.Node/NodeStageVolume")
	c.Below(t, server.ID, "csi-node", "step")
	c.Below(t, server.ID, "csi-node", "goes on without its caller")
	if n := len(c.Spans()); n != 3 || server.Trace == theirs {
		t.Errorf("%d spans", n)
	}
}

// Without a collector nothing is started, nothing is sent, and nothing is added.
func TestTraces_OffIsOff(t *testing.T) {
	c := collector.New(t)
	for name, env := range map[string]map[string]string{
		"no endpoint": {},
		"disabled":    {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": c.Endpoint()},
		"no exporter": {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": c.Endpoint()},
	} {
		t.Run(name, func(t *testing.T) {
			for key, value := range env {
				t.Setenv(key, value)
			}
			before := runtime.NumGoroutine()
			traces := Start("csi-node", "v", silent)
			if traces != nil || traces.Server() != nil || traces.Client() != nil || traces.Tracer() != nil ||
				traces.Logger(silent) != silent {
				t.Error("something is on")
			}
			if n := runtime.NumGoroutine(); n != before {
				t.Errorf("%d goroutines, %d before", n, before)
			}
			var got metadata.MD
			n := &node{log: silent, do: func(ctx context.Context) error {
				got, _ = metadata.FromIncomingContext(ctx)
				_, end := tracing.Begin(ctx, "step")
				end(nil)
				return nil
			}}
			_, err := serve(t, traces, n).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "vol"})
			ok(t, err)
			if len(got.Get("traceparent")) > 0 || len(got.Get("tracestate")) > 0 {
				t.Errorf("added: %v", got)
			}
			traces.Stop()
		})
	}
	if n := c.Connections(); n != 0 {
		t.Errorf("%d connections", n)
	}
}

// An invalid setting is logged, and volumes are served without traces. The endpoint's password is
// not logged.
func TestTraces_WhatCannotBeFollowed(t *testing.T) {
	for _, c := range []struct{ key, value, said string }{
		{"OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "http://HOST:PORT"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://me:hunter2@there", "http://HOST:PORT"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://", "http://HOST:PORT"},
		{"OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "only grpc"},
		{"OTEL_TRACES_EXPORTER", "zipkin", "only otlp"},
	} {
		t.Run(c.value, func(t *testing.T) {
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
			t.Setenv(c.key, c.value)
			var log bytes.Buffer
			traces := Start("csi-node", "v", slog.New(slog.NewTextHandler(&log, nil)))
			said := log.String()
			if traces != nil || !strings.Contains(said, "level=ERROR") || !strings.Contains(said, c.said) ||
				strings.Contains(said, "hunter2") {
				t.Errorf("%v, %s", traces, said)
			}
		})
	}
}

// The log names the collector without the password in its address.
func TestTraces_TheLogHasNoPassword(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:hunter2@127.0.0.1:1/?key=hunter2")
	var log bytes.Buffer
	traces := Start("csi-node", "v", slog.New(slog.NewTextHandler(&log, nil)))
	traces.Stop()
	if said := log.String(); traces == nil || !strings.Contains(said, "http://127.0.0.1:1") || strings.Contains(said, "hunter2") {
		t.Errorf("%v: %s", traces, said)
	}
}

// A collector that accepts connections and never answers delays no call, and the end of the process
// only for a few seconds.
func TestTraces_ACollectorThatHangs(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, c) }()
		}
	}()
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://"+l.Addr().String())
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
	var log bytes.Buffer
	traces := Start("csi-node", "v", slog.New(slog.NewTextHandler(&log, nil)))
	client := serve(t, traces, &node{log: silent, do: func(context.Context) error { return nil }})
	begin := time.Now()
	for range 100 {
		_, err := client.NodeStageVolume(called(t), &csi.NodeStageVolumeRequest{VolumeId: "vol"})
		ok(t, err)
	}
	if took := time.Since(begin); took > time.Minute { // a call that waits takes ten seconds
		t.Errorf("100 calls took %s", took)
	}
	begin = time.Now()
	traces.Stop()
	if took := time.Since(begin); took > 3*flushTime || !strings.Contains(log.String(), "the last spans are lost") {
		t.Errorf("%s; the log:\n%s", took, &log)
	}
}

// An unreachable collector is reported once, not with each batch.
func TestTraces_ComplaintsAreFew(t *testing.T) {
	var log bytes.Buffer
	c := &complaints{log: slog.New(slog.NewTextHandler(&log, nil))}
	for range 100 {
		c.Handle(errors.New("away"))
	}
	if n := strings.Count(log.String(), "traces are not sent"); n != 1 {
		t.Errorf("%d lines", n)
	}
}

func BenchmarkStep(b *testing.B) {
	for b.Loop() {
		_, end := tracing.Begin(context.Background(), "mount", tracing.Volume("pool-x"))
		end(nil)
	}
}
