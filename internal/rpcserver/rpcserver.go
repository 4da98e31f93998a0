// Package rpcserver serves gRPC on a unix socket and gives every call an id, a log line without
// secrets, metrics, and recovery from panics as errors.
package rpcserver

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

// LevelRequests is the log level at which whole requests are written.
const LevelRequests = slog.LevelDebug - 4

// ShareSocket lets a group besides root connect to the socket of an endpoint.
func ShareSocket(endpoint string, gid int) error {
	file := strings.TrimPrefix(endpoint, "unix://")
	if err := os.Chown(file, -1, gid); err != nil {
		return err
	}
	return os.Chmod(file, 0o660)
}

// Observer counts calls.
type Observer interface {
	Started(method string) (ended func(code string))
}

type interceptor struct {
	log     *slog.Logger
	metrics Observer
	calls   atomic.Uint64
	repeats repeats
}

// New makes a server. Status determines the codes of its handlers' errors.
func New(log *slog.Logger, metrics Observer, options ...grpc.ServerOption) *grpc.Server {
	i := &interceptor{log: log, metrics: metrics}
	// Reused workers keep their grown stacks: a fifth less time per call. Calls beyond that number
	// run concurrently as before.
	const workers = 8
	return grpc.NewServer(append([]grpc.ServerOption{grpc.UnaryInterceptor(i.unary), grpc.NumStreamWorkers(workers),
		grpc.Creds(newPeerCredentials())}, options...)...)
}

func (i *interceptor) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	method := path.Base(info.FullMethod)
	id := i.calls.Add(1)
	ended := i.metrics.Started(method)
	begin := time.Now()
	var details []string
	elsewhere := false
	defer func() {
		if p := recover(); p != nil {
			i.log.Error("panic", "request_id", id, "method", method, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = status.Errorf(codes.Internal, "%s: the driver met a bug (%v); its log has the details under request_id %d", method, p, id)
		}
		code := status.Code(err).String()
		if elsewhere { // ResourceExhausted would mean that a pool is full
			code = fault.Elsewhere.String()
		}
		ended(code)
		i.say(ctx, id, method, req, resp, time.Since(begin), err, details, elsewhere)
	}()
	resp, err = handler(audit.WithCaller(ctx, caller(ctx, method, id)), req)
	details = fault.Details(err)
	elsewhere = fault.Is(err, fault.Elsewhere)
	return resp, faultgrpc.Status(err)
}

// quiet lists the calls that orchestrators repeat all the time.
var quiet = map[string]bool{
	"Probe": true, "GetPluginInfo": true, "GetPluginCapabilities": true, "GetCapacity": true, "NodeGetInfo": true,
	"ControllerGetCapabilities": true, "NodeGetCapabilities": true, "RuntimeGetCapabilities": true, "RuntimeGetSupportedFileSystems": true,
	"RuntimeGetVolumeStats": true, "ListSandboxes": true, "NodeGetVolumeStats": true, "NodeGetVolumeHealth": true,
}

// refused lists the codes of calls that asked for the impossible, which is no failure of the
// driver.
var refused = map[codes.Code]bool{
	codes.InvalidArgument: true, codes.NotFound: true, codes.AlreadyExists: true, codes.FailedPrecondition: true,
	codes.OutOfRange: true, codes.Aborted: true, codes.Canceled: true, codes.Unimplemented: true,
}

func (i *interceptor) say(ctx context.Context, id uint64, method string, req, resp any, took time.Duration, err error, details []string,
	elsewhere bool) {
	level := slog.LevelInfo
	switch {
	case refused[status.Code(err)], elsewhere: // routine: the orchestrator asks another node
		level = slog.LevelWarn
	case err != nil:
		level = slog.LevelError
	case quiet[method]:
		level = slog.LevelDebug
	}
	about := about(req)
	call, unsaid := i.repeats.call(append([]string{method}, about...)...), 0
	switch {
	case err == nil:
		i.repeats.over(call)
	case status.Code(err) == codes.Internal: // each may be a different one
	default:
		var loud bool
		if loud, unsaid = i.repeats.again(time.Now(), call, err.Error()); !loud {
			level = slog.LevelDebug
		}
	}
	if !i.log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{slog.Uint64("request_id", id), slog.String("method", method), slog.Duration("took", took)}
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	for n, key := range aboutKeys {
		add(key, about[n])
	}
	if err == nil {
		switch r := resp.(type) {
		case *csi.CreateVolumeResponse:
			add("volume_id", r.GetVolume().GetVolumeId())
		case *csi.CreateSnapshotResponse:
			add("snapshot_id", r.GetSnapshot().GetSnapshotId())
		}
	}
	if err != nil {
		attrs = append(attrs, slog.String("code", status.Code(err).String()), slog.String("error", status.Convert(err).Message()))
		add("detail", strings.Join(details, "; "))
		if unsaid > 0 {
			attrs = append(attrs, slog.Int("repeated", unsaid))
		}
	}
	// A refusal's error already describes the object. To find a bug, an internal error needs the
	// whole request.
	if status.Code(err) == codes.Internal || i.log.Enabled(ctx, LevelRequests) {
		attrs = append(attrs, slog.String("request", protosanitizer.StripSecrets(req).String()))
	}
	i.log.LogAttrs(ctx, level, "call", attrs...)
}

// aboutKeys are the log keys for the results of about.
var aboutKeys = [...]string{"name", "volume_id", "snapshot_id", "sandbox_id", "host_volume_id", "target_path"}

// about returns the object of a request; empty if the request names none.
func about(req any) []string {
	all := make([]string, len(aboutKeys))
	if r, ok := req.(interface{ GetName() string }); ok {
		all[0] = r.GetName()
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		all[1] = r.GetVolumeId()
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		all[2] = r.GetSnapshotId()
	}
	if r, ok := req.(interface{ GetSandboxId() string }); ok {
		all[3] = r.GetSandboxId()
	}
	if r, ok := req.(interface{ GetHostVolumeId() string }); ok {
		all[4] = r.GetHostVolumeId()
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok {
		all[5] = r.GetTargetPath()
	}
	return all
}
