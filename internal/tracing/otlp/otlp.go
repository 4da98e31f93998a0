// Package otlp sends traces to an OpenTelemetry collector, if the environment names one:
// OTEL_EXPORTER_OTLP_ENDPOINT and the other variables of OpenTelemetry's specification. Otherwise
// it starts nothing, and every method of a nil Tracing does nothing.
package otlp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/crust-csi/crust-csi/internal/tracing"
)

// flushTime is how long a process waits for the collector when it ends.
const flushTime = 3 * time.Second

// Tracing makes and sends the spans of a process; nil is off.
type Tracing struct {
	provider *sdktrace.TracerProvider
	log      *slog.Logger
}

// Start returns nil, which does nothing, unless the environment names a collector. An invalid
// setting is logged and turns traces off: volumes matter more.
func Start(service, version string, log *slog.Logger) *Tracing {
	endpoint, err := endpoint(os.Getenv)
	if err != nil {
		log.Error("traces are off", "error", err)
	}
	if err != nil || endpoint == "" {
		return nil
	}
	ctx := context.Background()
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		log.Error("traces are off", "error", err)
		return nil
	}
	otel.SetErrorHandler(&complaints{log: log})
	// Attributes from the environment come last, and win.
	r, err := resource.New(ctx, resource.WithHost(), resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", service), attribute.String("service.version", version)),
		resource.WithFromEnv())
	if err != nil {
		log.Warn("a trace does not say all about this process", "error", err)
	}
	log.Info("traces are sent", "endpoint", endpoint)
	return &Tracing{sdktrace.NewTracerProvider(sdktrace.WithBatcher(modest{exporter}), sdktrace.WithResource(r)), log}
}

// endpoint returns the collector's endpoint, "" if there is none.
func endpoint(env func(string) string) (string, error) {
	of := func(name string) string {
		return strings.TrimSpace(cmp.Or(env("OTEL_EXPORTER_OTLP_TRACES_"+name), env("OTEL_EXPORTER_OTLP_"+name)))
	}
	text := of("ENDPOINT")
	if text == "" || strings.EqualFold(env("OTEL_SDK_DISABLED"), "true") || env("OTEL_TRACES_EXPORTER") == "none" {
		return "", nil
	}
	if kind := env("OTEL_TRACES_EXPORTER"); kind != "" && kind != "otlp" {
		return "", fmt.Errorf("OTEL_TRACES_EXPORTER=%s: only otlp is supported", kind)
	}
	if protocol := of("PROTOCOL"); protocol != "" && protocol != "grpc" {
		return "", fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%s: only grpc is supported", protocol)
	}
	// The exporter would silently use another endpoint.
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", errors.New("OTEL_EXPORTER_OTLP_ENDPOINT: give http://HOST:PORT, or https://HOST:PORT with TLS")
	}
	return u.Scheme + "://" + u.Host, nil // the rest may hold a password
}

// Stop sends the remaining spans, for a few seconds at most.
func (t *Tracing) Stop() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Warn("the last spans are lost", "error", err)
	}
}

// Tracer makes spans without a call as their parent; nil if traces are off.
func (t *Tracing) Tracer() trace.Tracer {
	if t == nil {
		return nil
	}
	return t.provider.Tracer("github.com/crust-csi/crust-csi/internal/tracing/otlp")
}

// Server makes a span for each call that a gRPC server receives, below its caller's.
func (t *Tracing) Server() []grpc.ServerOption {
	if t == nil {
		return nil
	}
	return []grpc.ServerOption{
		grpc.StatsHandler(otelgrpc.NewServerHandler(t.options()...)),
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			tracing.Describe(ctx, req)
			resp, err := handler(ctx, req)
			tracing.Fail(ctx, err)
			return resp, err
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			err := handler(srv, stream)
			tracing.Fail(stream.Context(), err)
			return err
		}),
	}
}

// Client makes a span for each call of a gRPC client, and passes it to the server.
func (t *Tracing) Client() []grpc.DialOption {
	if t == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(otelgrpc.NewClientHandler(t.options()...))}
}

func (t *Tracing) options() []otelgrpc.Option {
	return []otelgrpc.Option{
		otelgrpc.WithTracerProvider(t.provider), otelgrpc.WithMeterProvider(noop.NewMeterProvider()),
		otelgrpc.WithPropagators(propagation.TraceContext{}),
		otelgrpc.WithFilter(func(i *stats.RPCTagInfo) bool { return !polls[path.Base(i.FullMethodName)] }),
	}
}

// polls lists frequent calls that concern no volume, and the one that does not end.
var polls = map[string]bool{
	"Probe": true, "GetPluginInfo": true, "GetPluginCapabilities": true, "GetCapacity": true, "NodeGetInfo": true,
	"ControllerGetCapabilities": true, "NodeGetCapabilities": true, "Watch": true,
}

// complaints logs the exporter's errors, once in a while: an unreachable collector must not fill
// the log.
type complaints struct {
	log  *slog.Logger
	last atomic.Int64
}

// Handle is called by OpenTelemetry's SDK.
func (c *complaints) Handle(err error) {
	const pause = 10 * time.Minute
	now, last := time.Now().UnixNano(), c.last.Load()
	if (last == 0 || now-last > int64(pause)) && c.last.CompareAndSwap(last, now) {
		c.log.Warn("traces are not sent", "error", err)
	}
}
