package orchestrator

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// What the agent does not handle passes unchanged: unknown methods and fields, metadata, deadlines,
// and errors with their details.
func TestC22_TheProxyChangesNothing(t *testing.T) {
	r := newRig(t)
	req := request()
	req.VolumeContext = nil // podInfoOnMount is off
	req.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 4242, protowire.VarintType), 7))
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(r.ctx(), "x-kubelet", "yes"), time.Minute)
	defer cancel()
	resp, err := r.kubelet.NodePublishVolume(ctx, req)
	ok(t, err)
	if !strings.Contains(string(resp.ProtoReflect().GetUnknown()), "later") {
		t.Errorf("the answer's unknown field is gone: %q", resp.ProtoReflect().GetUnknown())
	}
	if got := r.driver.last(); !proto.Equal(got, req) || len(got.ProtoReflect().GetUnknown()) == 0 {
		t.Errorf("the driver got %v", got)
	}
	if got := r.driver.md.Get("x-kubelet"); len(got) != 1 || got[0] != "yes" {
		t.Errorf("metadata %v", r.driver.md)
	}
	if d := r.driver.deadline; d <= 0 || d > time.Minute {
		t.Errorf("deadline %s", d)
	}
	detailed, err := status.New(codes.ResourceExhausted, "full").WithDetails(durationpb.New(time.Minute))
	ok(t, err)
	r.driver.fail = detailed.Err()
	_, err = r.kubelet.NodePublishVolume(ctx, req)
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || s.Message() != "full" || len(s.Details()) != 1 {
		t.Errorf("%v with %v", err, s.Details())
	}
	err = r.conn.Invoke(ctx, "/csi.v9.Node/NodeDance", &csi.ProbeRequest{}, &csi.ProbeResponse{})
	if s := status.Convert(err); s.Code() != codes.Unimplemented || !strings.Contains(s.Message(), "csi.v9.Node") {
		t.Errorf("an unknown method: %v", err)
	}
	if said := r.said(); said != "" {
		t.Errorf("events: %s", said)
	}
}

// The driver learns of the pod what the kubelet omits, even if no sandbox takes part.
func TestC22_TheDriverIsToldOfThePod(t *testing.T) {
	policy, no := corev1.FSGroupChangeOnRootMismatch, false
	r := newRig(t, pod(func(p *corev1.Pod) {
		p.Spec.RuntimeClassName, p.Spec.HostUsers = nil, &no
		p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroupChangePolicy: &policy}
	}))
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	got := r.driver.last().GetVolumeContext()
	if got[crust.ContextGroupPolicy] != "OnRootMismatch" || got[crust.ContextHostUsers] != "false" || len(got) != 5 {
		t.Errorf("%v", got)
	}
	// A class's own value is not overruled.
	req := request()
	req.VolumeContext[crust.ContextGroupPolicy] = "Always"
	_, err = r.kubelet.NodePublishVolume(r.ctx(), req)
	ok(t, err)
	if got := r.driver.last().GetVolumeContext()[crust.ContextGroupPolicy]; got != "Always" {
		t.Errorf("%q", got)
	}
	// Nothing is guessed of an unknown pod.
	req = request()
	req.VolumeContext[attrPodUID] = "another"
	if _, err = r.kubelet.NodePublishVolume(r.ctx(), req); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

// The pod's policy wins, then its class's, then the kubelet's default.
func TestC13_WhichPolicyCounts(t *testing.T) {
	always, mismatch := corev1.FSGroupChangeAlways, corev1.FSGroupChangeOnRootMismatch
	for name, c := range map[string]struct {
		pod   *corev1.PodFSGroupChangePolicy
		class string
		want  corev1.PodFSGroupChangePolicy
	}{
		"the pod's":     {&always, "OnRootMismatch", always},
		"the class's":   {nil, "OnRootMismatch", mismatch},
		"the kubelet's": {nil, "", always},
	} {
		t.Run(name, func(t *testing.T) {
			gid := int64(3000)
			r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
				p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &gid, FSGroupChangePolicy: c.pod}
			}))...)
			req := request()
			if c.class != "" {
				req.VolumeContext["fsGroupChangePolicy"] = c.class
			}
			_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
			ok(t, err)
			ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
			if got := r.runtime.Published("sb", "/dev/loop7").GetFsgroupPolicy(); got != string(c.want) {
				t.Errorf("the runtime is told %q, want %q", got, c.want)
			}
		})
	}
}

func TestC21_C22_DeferredAndCarriedOut(t *testing.T) {
	gid, policy := int64(3000), corev1.FSGroupChangeAlways
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &gid, FSGroupChangePolicy: &policy}
	}))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request()) // a repeated call
	ok(t, err)
	if said := r.said(); strings.Count(said, EventDeferred) != 1 {
		t.Errorf("events: %s", said)
	}
	// The kubelet grows an enlarged volume before it asks for a sandbox, and accepts only success.
	if r, err := r.kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target}); err != nil {
		t.Errorf("growth before there is a sandbox: %v %v", r, err)
	}
	if _, err := r.kubelet.NodeGetVolumeStats(r.ctx(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: target}); status.Code(err) != codes.Unavailable {
		t.Errorf("stats before there is a sandbox: %v", err)
	}
	sandbox := podSandbox{"sb", 1}
	if err := r.agent.missing("u1", "sb"); err == nil {
		t.Error("a container could start before the volume is there")
	}
	ok(t, r.agent.publishAll(r.ctx(), "u1", sandbox))
	ok(t, r.agent.publishAll(r.ctx(), "u1", sandbox))
	ok(t, r.agent.missing("u1", "sb"))
	got := r.runtime.Published("sb", "/dev/loop7")
	if got.GetHostTargetPath() != target || got.GetFileSystem() != "ext4" || !slices.Equal(got.GetMountOptions(), []string{"noatime"}) ||
		got.GetFsgroupGid() != 3000 || got.GetFsgroupPolicy() != "Always" {
		t.Errorf("published %v", got)
	}
	stats, err := r.kubelet.NodeGetVolumeStats(r.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: target})
	ok(t, err)
	if len(stats.GetUsage()) == 0 || stats.GetUsage()[0].GetTotal() == 0 {
		t.Errorf("stats %v", stats)
	}
	const size = 1 << 30
	grown, err := r.kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	ok(t, err)
	if grown.GetCapacityBytes() != size {
		t.Errorf("grown to %d", grown.GetCapacityBytes())
	}
	// The record survives the agent.
	again, err := LoadRecords(r.records, "boot")
	ok(t, err)
	if d, known := again.Get(target); !known || d.Sandbox != "sb" || d.Source != "/dev/loop7" || *d.Group != 3000 {
		t.Errorf("after a restart: %+v", d)
	}
	_, err = r.kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	ok(t, err)
	if _, known := r.agent.Records.Get(target); known || r.driver.deferred[target] {
		t.Error("still deferred")
	}
}

// C23: whoever fails on the way, the pod fails and gets an event, and the driver does not mount
// instead.
func TestC23_NothingFallsBack(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimeGetCapabilities" {
			return status.Error(codes.Internal, "out of order")
		}
		return nil
	}
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "out of order") {
		t.Errorf("%v", err)
	}
	if len(r.driver.published) != 0 {
		t.Error("the driver was asked")
	}
	if said := r.said(); !strings.Contains(said, EventFailed) || !strings.Contains(said, "out of order") {
		t.Errorf("events: %s", said)
	}
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimePublishVolume" {
			return status.Error(codes.Internal, "no room")
		}
		return nil
	}
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if err := r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("%v", err)
	}
	if err := r.agent.missing("u1", "sb"); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("%v", err)
	}
	r.runtime.Fail = nil
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1})) // a retry
}

// A publish that outlives its hook goes on. Containers wait for it, and NodeUnpublishVolume ends
// it.
func TestC24_ASlowPublish(t *testing.T) {
	const runtimePatience = 2 * time.Second // NRI's: then the runtime goes on without the plugin
	if hookPatience > runtimePatience*3/4 {
		t.Errorf("a hook waits for %s, and the runtime for %s", hookPatience, runtimePatience)
	}
	made := time.Now()
	r := deferredRig(t)
	usual := time.Since(made) // time of one call
	r.agent.hookPatience = hookPatience
	release := make(chan struct{})
	r.runtime.Fail = func(ctx context.Context, call string, _ proto.Message) error {
		if call != "RuntimePublishVolume" {
			return nil
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	begin := time.Now()
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	if took := time.Since(begin); took > hookPatience+max(runtimePatience/5, 10*usual) {
		t.Errorf("the hook took %s; after %s the runtime goes on without the plugin", took, runtimePatience)
	}
	if err := r.agent.missing("u1", "sb"); err == nil || !strings.Contains(err.Error(), "is being mounted") {
		t.Errorf("%v", err)
	}
	// The runtime's hooks run one after another, for all pods.
	begin = time.Now()
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	if took := time.Since(begin); took > hookPatience*9/10 {
		t.Errorf("the next hook waited for %s again", took)
	}
	close(release)
	for end := time.Now().Add(time.Minute); r.agent.missing("u1", "sb") != nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not arrive")
		}
	}
	ok(t, r.unpublish())
}

func (r *rig) unpublish() error {
	_, err := r.kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	return err
}

func TestC21_WhoSaysNo(t *testing.T) {
	for name, c := range map[string]struct {
		objects []runtime.Object
		change  func(*corev1.Pod)
		request func(*csi.NodePublishVolumeRequest)
		driver  func(*driver)
		why     string // empty: no event
	}{
		"no RuntimeClass": {objects: storage("true", corev1.ReadWriteOncePod),
			change: func(p *corev1.Pod) { p.Spec.RuntimeClassName = nil }},
		"the StorageClass": {objects: storage("false", corev1.ReadWriteOncePod), why: "StorageClass"},
		"the access mode":  {objects: storage("true", corev1.ReadWriteOnce), why: "ReadWriteOncePod"},
		"a subPath, and the driver": {objects: storage("true", corev1.ReadWriteOncePod), why: "placeholder has no directories",
			driver: func(d *driver) { d.noSubPaths = true },
			change: func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].SubPath = "a" }},
		"a subPath that is too long": {objects: storage("true", corev1.ReadWriteOncePod), why: "of names of up to 255 bytes",
			change: func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].SubPath = strings.Repeat("n", 256) }},
		"a subPath with variables": {objects: storage("true", corev1.ReadWriteOncePod), why: "only the kubelet knows its value",
			change: func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].SubPathExpr = "$(POD)" }},
		"a block volume": {objects: storage("true", corev1.ReadWriteOncePod), why: "raw block",
			request: func(r *csi.NodePublishVolumeRequest) {
				r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
			}},
		"an inline volume": {objects: storage("true", corev1.ReadWriteOncePod), why: "inline",
			request: func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[attrEphemeral] = "true" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(c.objects, pod(c.change))...)
			req := request()
			if c.request != nil {
				c.request(req)
			}
			if c.driver != nil {
				c.driver(r.driver)
			}
			_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
			ok(t, err)
			if fs, err := crust.SupportedFilesystems(r.driver.last()); err != nil || len(fs) != 0 {
				t.Errorf("the driver was told of %v, %v", fs, err)
			}
			if len(r.runtime.Calls()) != 0 {
				t.Errorf("the runtime was bothered: %v", r.runtime.Calls())
			}
			said := r.said()
			if c.why == "" && said != "" || c.why != "" && (!strings.Contains(said, EventMountedByHost) || !strings.Contains(said, c.why)) {
				t.Errorf("events: %q", said)
			}
		})
	}
}
