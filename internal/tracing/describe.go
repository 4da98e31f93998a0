package tracing

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// ofPod maps the kubelet's keys for a pod, in a volume's context, to OpenTelemetry's names.
var ofPod = map[string]attribute.Key{
	"csi.storage.k8s.io/pod.name":      "k8s.pod.name",
	"csi.storage.k8s.io/pod.namespace": "k8s.namespace.name",
	"csi.storage.k8s.io/pod.uid":       "k8s.pod.uid",
}

// Volume is the attribute for a span's volume.
func Volume(id string) attribute.KeyValue { return attribute.String("csi.volume.id", id) }

// Sandbox is the attribute for a span's sandbox.
func Sandbox(id string) attribute.KeyValue { return attribute.String("crust.sandbox.id", id) }

// ExitCode records on the context's span how a program ended.
func ExitCode(ctx context.Context, code int) {
	trace.SpanFromContext(ctx).SetAttributes(attribute.Int("process.exit.code", code))
}

// Pod returns the attributes for a span's pod.
func Pod(namespace, name, uid string) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("k8s.namespace.name", namespace), attribute.String("k8s.pod.name", name), attribute.String("k8s.pod.uid", uid),
	}
}

// Describe describes a request on the context's span. It selects fields by name: nothing else, such
// as secrets and mount options, gets into a trace.
func Describe(ctx context.Context, request any) {
	if !Sampled(ctx) {
		return
	}
	var list []attribute.KeyValue
	add := func(key attribute.Key, value string) {
		if value != "" {
			list = append(list, key.String(value))
		}
	}
	if r, ok := request.(interface{ GetVolumeId() string }); ok {
		add("csi.volume.id", r.GetVolumeId())
	}
	if r, ok := request.(interface{ GetSnapshotId() string }); ok {
		add("csi.snapshot.id", r.GetSnapshotId())
	}
	if r, ok := request.(interface{ GetName() string }); ok {
		add("csi.name", r.GetName())
	}
	if r, ok := request.(interface{ GetSandboxId() string }); ok {
		add("crust.sandbox.id", r.GetSandboxId())
	}
	if r, ok := request.(interface{ GetHostVolumeId() string }); ok {
		add("crust.host_volume.id", r.GetHostVolumeId())
	}
	if r, ok := request.(interface{ GetVolumeContext() map[string]string }); ok {
		for key, name := range ofPod {
			add(name, r.GetVolumeContext()[key])
		}
	}
	trace.SpanFromContext(ctx).SetAttributes(list...)
}
