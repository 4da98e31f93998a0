package qemu

import (
	"context"
	"math"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
)

// traced returns a context with a span, and a recorder of its children.
func traced(ctx context.Context) (context.Context, *tracetest.SpanRecorder) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	ctx, _ = provider.Tracer("test").Start(ctx, "RuntimePublishVolume")
	return ctx, recorder
}

// A guest's report makes at most one span of each kind, inside the call's time, without any of the
// guest's text.
func TestTraces_AGuestThatLies(t *testing.T) {
	var steps []*guestv1.Step
	add := func(kind guestv1.Step_Kind, begin, end int64) {
		steps = append(steps, &guestv1.Step{Kind: kind, Begin: begin, End: end})
	}
	add(guestv1.Step_KIND_MOUNT, math.MinInt64, math.MaxInt64)
	add(guestv1.Step_KIND_GROW, math.MaxInt64, math.MinInt64)
	add(guestv1.Step_KIND_OWNERSHIP, -1, int64(time.Hour))
	for n := range 800 {
		add(guestv1.Step_Kind(n), int64(n), int64(n+1))
	}
	b, err := proto.Marshal(&guestv1.MountResponse{Path: "/x", Steps: steps})
	if err != nil || len(b) > mostOfAnswer {
		t.Fatal(len(b), err)
	}
	l := newLiar(t)
	l.answer = func() ([]byte, error) { return b, nil }
	ctx, recorder := traced(t.Context())
	if _, err := l.box.Publish(ctx, ofLiar); err != nil {
		t.Fatal(err)
	}
	var call sdktrace.ReadOnlySpan
	var of []sdktrace.ReadOnlySpan
	for _, s := range recorder.Ended() {
		switch s.Name() {
		case "guest Mount":
			call = s
		case "plug in disk":
		default:
			of = append(of, s)
		}
	}
	if call == nil || len(of) != len(shown) {
		t.Fatalf("%d spans of a guest, of one call: %v", len(of), call)
	}
	for _, s := range of {
		within := !s.StartTime().Before(call.StartTime()) && !s.EndTime().After(call.EndTime()) && !s.EndTime().Before(s.StartTime())
		if s.Parent().SpanID() != call.SpanContext().SpanID() || !within || len(s.Attributes()) > 0 {
			t.Errorf("%s %s to %s, in %s to %s", s.Name(), s.StartTime(), s.EndTime(), call.StartTime(), call.EndTime())
		}
	}
}

// A guest learns nothing of the trace. It is asked for steps only if the call is traced.
func TestTraces_WhatAGuestIsTold(t *testing.T) {
	ask := func(ctx context.Context) *guestv1.MountRequest {
		t.Helper()
		request := &guestv1.MountRequest{Serial: "x"}
		err := spans(ctx, guestv1.Guest_Mount_FullMethodName, request, &guestv1.MountResponse{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				if md, ok := metadata.FromOutgoingContext(ctx); ok {
					t.Errorf("told: %v", md)
				}
				return nil
			})
		if err != nil {
			t.Error(err)
		}
		return request
	}
	if r := ask(t.Context()); !proto.Equal(r, &guestv1.MountRequest{Serial: "x"}) {
		t.Errorf("without a trace: %v", r)
	}
	ctx, recorder := traced(t.Context())
	if r := ask(ctx); !r.GetReportSteps() || len(recorder.Ended()) != 1 {
		t.Errorf("%v, %d spans", r, len(recorder.Ended()))
	}
}

// An older guest reports no steps, but its call has a span. A failed call's span has an error
// status without the guest's text.
func TestTraces_AGuestThatFails(t *testing.T) {
	l := newLiar(t)
	l.answer = func() ([]byte, error) { return nil, context.DeadlineExceeded }
	ctx, recorder := traced(t.Context())
	if _, err := l.box.Publish(ctx, sandbox.Volume{Device: ofLiar.Device}); err == nil {
		t.Error("it was to fail")
	}
	for _, s := range recorder.Ended() {
		if s.Name() == "guest Mount" && s.Status().Code.String() == "Error" && s.Status().Description == "" {
			return
		}
	}
	t.Errorf("%v", recorder.Ended())
}
