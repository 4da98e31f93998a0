package otlp

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/crust-csi/crust-csi/internal/plain"
)

// mostText limits a text in a span, in bytes.
const mostText = 300

// modest exports only short, printable text, and no error texts, which may quote a request, a
// runtime or a file system. A single text with invalid UTF-8 would lose all spans that are sent
// with it.
type modest struct{ sdktrace.SpanExporter }

func (m modest) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	list := make([]sdktrace.ReadOnlySpan, len(spans))
	for i, s := range spans {
		list[i] = modestSpan{s}
	}
	return m.SpanExporter.ExportSpans(ctx, list)
}

type modestSpan struct{ sdktrace.ReadOnlySpan }

func (s modestSpan) Name() string { return plain.Text(s.ReadOnlySpan.Name(), mostText) }

func (s modestSpan) Status() sdktrace.Status {
	return sdktrace.Status{Code: s.ReadOnlySpan.Status().Code}
}

// Events returns nil: the SDK turns a panic into an event with its text.
func (modestSpan) Events() []sdktrace.Event { return nil }

func (s modestSpan) Attributes() []attribute.KeyValue {
	list := s.ReadOnlySpan.Attributes()
	kept := make([]attribute.KeyValue, 0, len(list))
	for _, a := range list {
		if a.Value.Type() == attribute.STRING {
			a = a.Key.String(plain.Text(a.Value.AsString(), mostText))
		}
		kept = append(kept, a)
	}
	return kept
}
