// Package tracing makes spans for slow steps inside a call. It makes a span only below a sampled
// one: while traces are off, nothing is measured and nothing is stored. The package does not send
// spans; its subpackage otlp does.
package tracing

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const scope = "github.com/crust-csi/crust-csi/internal/tracing"

// Sampled reports whether the context's span is sampled.
func Sampled(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }

// tracer returns the tracer of the context's span; it makes no spans if that span does not.
func tracer(ctx context.Context) trace.Tracer {
	return trace.SpanFromContext(ctx).TracerProvider().Tracer(scope)
}

func nobody(error) {}

// Begin begins a span below the context's, even if that one has ended. The returned function ends
// it; an error sets its status, without the error's text.
func Begin(ctx context.Context, name string, attributes ...attribute.KeyValue) (context.Context, func(error)) {
	if !Sampled(ctx) {
		return ctx, nobody
	}
	ctx, span := tracer(ctx).Start(ctx, name, trace.WithAttributes(attributes...))
	return ctx, func(err error) {
		fail(span, err)
		span.End()
	}
}

// Call is Begin for a call of another process.
func Call(ctx context.Context, name string) (context.Context, func(error)) {
	if !Sampled(ctx) {
		return ctx, nobody
	}
	ctx, span := tracer(ctx).Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
	return ctx, func(err error) {
		fail(span, err)
		span.End()
	}
}

// Past makes a span, below the context's, from another process's measurements.
func Past(ctx context.Context, name string, begin, end time.Time, attributes ...attribute.KeyValue) {
	if !Sampled(ctx) {
		return
	}
	_, span := tracer(ctx).Start(ctx, name, trace.WithTimestamp(begin), trace.WithAttributes(attributes...))
	span.End(trace.WithTimestamp(end))
}

// Fail marks the context's span as failed.
func Fail(ctx context.Context, err error) { fail(trace.SpanFromContext(ctx), err) }

// fail adds no description: an error's text may quote a request. The log has it, with the trace's
// id.
func fail(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, "")
	}
}

const traceparent = "traceparent"

// Parent returns the context's span as W3C traceparent, "" if there is none. It includes the
// sampling decision: spans below an unsampled one are not sampled either.
func Parent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparent]
}

// Continue begins a span below the one that parent names, in another process or an earlier run of
// this one. If parent is invalid or empty, the span starts its own trace. A nil tracer makes
// nothing.
func Continue(ctx context.Context, t trace.Tracer, parent, name string, attributes ...attribute.KeyValue) (context.Context, func(error)) {
	if t == nil {
		return ctx, nobody
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: parent})
	ctx, span := t.Start(ctx, name, trace.WithAttributes(attributes...))
	return ctx, func(err error) {
		fail(span, err)
		span.End()
	}
}
