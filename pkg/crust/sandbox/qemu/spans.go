package qemu

import (
	"context"
	"path"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/tracing"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// spans makes a span of each call to a guest that belongs to a trace, and child spans of the steps
// that the guest reports. The guest learns nothing of the trace, and none of its text enters a
// span.
func spans(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption) error {

	if !tracing.Sampled(ctx) {
		return invoke(ctx, method, req, reply, conn, options...)
	}
	ctx, end := tracing.Call(ctx, "guest "+path.Base(method))
	if r, ok := req.(*guestv1.MountRequest); ok {
		r.ReportSteps = true
	}
	begin := time.Now()
	err := invoke(ctx, method, req, reply, conn, options...)
	if r, ok := reply.(*guestv1.MountResponse); ok && err == nil {
		showSteps(ctx, begin, time.Now(), r.GetSteps())
	}
	end(err)
	return err
}

// shown maps steps to span names.
var shown = map[guestv1.Step_Kind]string{
	guestv1.Step_KIND_DEVICE: "guest: wait for disk", guestv1.Step_KIND_MOUNT: "guest: mount",
	guestv1.Step_KIND_GROW: "guest: grow file system", guestv1.Step_KIND_OWNERSHIP: "guest: give files to group",
}

// showSteps makes spans of the steps that a guest reports for a call. Each kind has at most one
// span, clamped to the call's time.
func showSteps(ctx context.Context, begin, end time.Time, steps []*guestv1.Step) {
	took := end.Sub(begin)
	within := func(at int64, least time.Duration) time.Duration { return min(max(time.Duration(at), least), took) }
	seen := map[guestv1.Step_Kind]bool{}
	for _, s := range steps {
		name := shown[s.GetKind()]
		if name == "" || seen[s.GetKind()] {
			continue
		}
		seen[s.GetKind()] = true
		from := within(s.GetBegin(), 0)
		tracing.Past(ctx, name, begin.Add(from), begin.Add(within(s.GetEnd(), from)))
	}
}
