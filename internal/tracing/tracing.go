// Package tracing makes spans of what takes time inside a call. A span is made
// only below one that is sampled: while traces are off, nothing is measured and
// nothing is kept. The package does not send spans; see its directory otlp.
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

// Sampled tells whether the context's span is sampled.
func Sampled(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }

// tracer is that of the context's span; it makes no spans if that span does not.
func tracer(ctx context.Context) trace.Tracer {
	return trace.SpanFromContext(ctx).TracerProvider().Tracer(scope)
}

func nobody(error) {}

// Begin begins a span below the context's, also if that one has ended. The
// returned function ends it; an error is its status, without a word of its text.
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

// Past makes a span, below the context's, of what somebody else has measured.
func Past(ctx context.Context, name string, begin, end time.Time, attributes ...attribute.KeyValue) {
	if !Sampled(ctx) {
		return
	}
	_, span := tracer(ctx).Start(ctx, name, trace.WithTimestamp(begin), trace.WithAttributes(attributes...))
	span.End(trace.WithTimestamp(end))
}

// Fail notes that what the context's span is of has failed.
func Fail(ctx context.Context, err error) { fail(trace.SpanFromContext(ctx), err) }

// fail gives no description: an error's text may quote what a request said. The log
// has it, with the trace's id.
func fail(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, "")
	}
}

const traceparent = "traceparent"

// Parent is the context's span as W3C's traceparent, empty if there is none. Of a span
// that is not sampled it says so: what goes on below it is not sampled either.
func Parent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparent]
}

// Continue begins a span below the one that parent names, in another process or
// another life of this one. A parent that is none, or empty, makes it a trace of its
// own. A nil tracer makes nothing.
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
