// Package collector is an OpenTelemetry collector for tests: it stores the spans that it receives
// over gRPC.
package collector

import (
	"bytes"
	"context"
	"encoding/hex"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Collector listens on this machine.
type Collector struct {
	collectorpb.UnimplementedTraceServiceServer
	endpoint    string
	connections atomic.Int64

	mu    sync.Mutex
	spans []Span
	raw   bytes.Buffer
}

// Span is a span as received.
type Span struct {
	Service, Name, Trace, ID, Parent string
	Attributes                       map[string]string // only text values
	Numbers                          map[string]int64
	Begin, End                       time.Time
	Failed                           bool
	Words                            string // of its status
}

type counted struct {
	net.Listener
	n *atomic.Int64
}

func (l counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// New starts a collector that ends with the test.
func New(t testing.TB) *Collector {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &Collector{endpoint: "http://" + l.Addr().String()}
	s := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(s, c)
	go func() { _ = s.Serve(counted{l, &c.connections}) }()
	t.Cleanup(s.Stop)
	return c
}

// Use makes processes that the test starts, and the test itself, send spans here immediately.
func (c *Collector) Use(t testing.TB) {
	t.Helper()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.endpoint)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
}

// Endpoint is the address on which it listens.
func (c *Collector) Endpoint() string { return c.endpoint }

// Connections returns the number of connections so far.
func (c *Collector) Connections() int64 { return c.connections.Load() }

// Export receives spans.
func (c *Collector) Export(_ context.Context, r *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	b, err := proto.Marshal(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.Write(b)
	for _, rs := range r.GetResourceSpans() {
		service := ""
		for _, a := range rs.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				c.spans = append(c.spans, span(service, s))
			}
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, err
}

func span(service string, s *tracepb.Span) Span {
	at := func(ns uint64) time.Time { return time.Unix(0, int64(ns)) }
	out := Span{
		Service: service, Name: s.GetName(),
		Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
		Attributes: map[string]string{}, Numbers: map[string]int64{}, Begin: at(s.GetStartTimeUnixNano()), End: at(s.GetEndTimeUnixNano()),
		Failed: s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR, Words: s.GetStatus().GetMessage(),
	}
	for _, e := range s.GetEvents() {
		out.Words += e.String()
	}
	for _, a := range s.GetAttributes() {
		out.Attributes[a.GetKey()], out.Numbers[a.GetKey()] = a.GetValue().GetStringValue(), a.GetValue().GetIntValue()
	}
	return out
}

// Spans returns the spans received so far.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// Has reports whether text occurs in anything received.
func (c *Collector) Has(text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Contains(c.raw.Bytes(), []byte(text))
}

// Below waits for a service's span with this name and parent.
func (c *Collector) Below(t testing.TB, parent, service, name string) Span {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		all := c.Spans()
		for _, s := range all {
			if s.Parent == parent && s.Service == service && s.Name == name {
				return s
			}
		}
		if time.Now().After(deadline) {
			for _, s := range all {
				t.Logf("%s %s below %s: %s %q", s.Trace, s.ID, s.Parent, s.Service, s.Name)
			}
			t.Fatalf("%s has no span %q below %s", service, name, parent)
		}
	}
}
