package orchestrator

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	eventrecorder "k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// driver answers as a CSI driver that defers ext4, and remembers what it was
// asked.
type driver struct {
	csi.UnimplementedNodeServer
	mu        sync.Mutex
	published []*csi.NodePublishVolumeRequest
	deferred  map[string]bool
	md        metadata.MD
	deadline  time.Duration
	fail      error
	options   map[string]string
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: crust.NodeCapability}}}}}, nil
}

func (d *driver) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.published = append(d.published, r)
	d.md, _ = metadata.FromIncomingContext(ctx)
	if at, ok := ctx.Deadline(); ok {
		d.deadline = time.Until(at)
	}
	resp := &csi.NodePublishVolumeResponse{}
	// A field of a later CSI.
	resp.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 999, protowire.BytesType), "later"))
	if d.fail != nil {
		return nil, d.fail
	}
	fs, err := crust.SupportedFilesystems(r)
	if err != nil || !slices.Contains(fs, "ext4") {
		return resp, err
	}
	d.deferred[r.GetTargetPath()] = true
	return resp, crust.SetMountInfo(resp, crust.MountInfo{Source: "/dev/loop7", Type: "ext4", Options: d.options})
}

func (d *driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.deferred, r.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, d.fail
}

func (d *driver) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.deferred[r.GetVolumePath()] {
		return nil, status.Error(codes.NotFound, "it is not published there")
	}
	resp := &csi.NodeGetVolumeStatsResponse{}
	yes, err := crust.SupportsStats(r)
	if err != nil || !yes {
		return nil, status.Error(codes.FailedPrecondition, "nobody can tell")
	}
	return resp, crust.SetStatsSource(resp, "/dev/loop7")
}

func (d *driver) NodeExpandVolume(_ context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	resp := &csi.NodeExpandVolumeResponse{}
	yes, err := crust.SupportsExpand(r)
	if err != nil || !yes {
		return nil, status.Error(codes.FailedPrecondition, "the runtime cannot")
	}
	return resp, crust.SetExpandSource(resp, "/dev/loop7")
}

func (d *driver) last() *csi.NodePublishVolumeRequest {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.published[len(d.published)-1]
}

// sandboxes manages the runtime's, and is as busy as it is told.
type sandboxes struct {
	crustv1alpha1.UnimplementedSandboxManagementServer
	asked, busy atomic.Int32
}

func (*sandboxes) RegisterSandbox(context.Context, *crustv1alpha1.RegisterSandboxRequest) (*crustv1alpha1.RegisterSandboxResponse, error) {
	return &crustv1alpha1.RegisterSandboxResponse{}, nil
}

func (*sandboxes) DeregisterSandbox(context.Context, *crustv1alpha1.DeregisterSandboxRequest) (*crustv1alpha1.DeregisterSandboxResponse, error) {
	return &crustv1alpha1.DeregisterSandboxResponse{}, nil
}

func (s *sandboxes) UnpublishVolume(context.Context, *crustv1alpha1.UnpublishVolumeRequest) (*crustv1alpha1.UnpublishVolumeResponse, error) {
	if s.asked.Add(1) <= s.busy.Load() {
		return nil, status.Error(codes.Aborted, "busy with it")
	}
	return &crustv1alpha1.UnpublishVolumeResponse{}, nil
}

// rig is an agent between a kubelet's client and a driver.
type rig struct {
	t       testing.TB
	agent   *Agent
	driver  *driver
	runtime *crusttest.Server
	kubelet csi.NodeClient
	conn    *grpc.ClientConn
	events  *eventrecorder.FakeRecorder
	cluster *fake.Clientset
	records string
	manager *sandboxes
}

func serve(t testing.TB, s *grpc.Server, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	l, err := net.Listen("unix", path)
	ok(t, err)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return "unix://" + path
}

func dialer(t testing.TB, endpoint string) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	ok(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// deferredRig is one whose volume was deferred.
func deferredRig(t testing.TB) *rig {
	t.Helper()
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	return r
}

func newRig(t testing.TB, objects ...runtime.Object) *rig {
	t.Helper()
	return newTracedRig(t, tracings{}, objects...)
}

// tracings are those of a rig's processes; nil ones are off.
type tracings struct{ agent, driver, runtime *otlp.Tracing }

func newTracedRig(t testing.TB, traces tracings, objects ...runtime.Object) *rig {
	t.Helper()
	r := &rig{t: t, driver: &driver{deferred: map[string]bool{}, options: map[string]string{"noatime": ""}}, runtime: crusttest.New(), events: eventrecorder.NewFakeRecorder(100), records: t.TempDir(), manager: &sandboxes{}}
	ds := grpc.NewServer(traces.driver.Server()...)
	csi.RegisterNodeServer(ds, r.driver)
	own := serve(t, ds, "csi.sock")
	rs := grpc.NewServer(traces.runtime.Server()...)
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(rs, r.runtime)
	crustv1alpha1.RegisterSandboxManagementServer(rs, r.manager)
	socket := serve(t, rs, "crust.sock")
	objects = append(objects, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "sandbox", Annotations: map[string]string{SocketAnnotation: socket}}, Handler: "h"})
	r.cluster = fake.NewClientset(objects...)
	ctx, cancel := context.WithCancel(context.Background())
	records, err := LoadRecords(r.records, "boot")
	ok(t, err)
	conn, err := Dial(own, traces.agent.Client()...)
	ok(t, err)
	t.Cleanup(func() { conn.Close() })
	r.agent = New(Config{
		Driver: conn, Pods: WatchPods(ctx, r.cluster, "node"), Records: records, Events: r.events, Log: slog.New(slog.DiscardHandler),
		Tracer: traces.agent.Tracer(), DialOptions: traces.agent.Client(),
	})
	t.Cleanup(func() { cancel(); ok(t, r.agent.Close()) })
	r.conn = dialer(t, serve(t, r.agent.Proxy().Server(traces.agent.Server()...), "agent.sock"))
	r.kubelet = csi.NewNodeClient(r.conn)
	return r
}

const target = "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~csi/pv-1/mount"

func pod(change func(*corev1.Pod)) *corev1.Pod {
	class := "sandbox"
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}, Spec: corev1.PodSpec{
		RuntimeClassName: &class, NodeName: "node",
		Containers: []corev1.Container{{Name: "c", VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/data"}}}},
		Volumes:    []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}}},
	}}
	if change != nil {
		change(p)
	}
	return p
}

func storage(allow string, mode corev1.PersistentVolumeAccessMode) []runtime.Object {
	return []runtime.Object{
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-1"}, Spec: corev1.PersistentVolumeSpec{
			StorageClassName: "class", AccessModes: []corev1.PersistentVolumeAccessMode{mode}, ClaimRef: &corev1.ObjectReference{Namespace: "ns", Name: "claim"},
		}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "class"}, Parameters: map[string]string{allowParameter: allow}},
	}
}

func request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: "vol", TargetPath: target, VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}},
		VolumeContext: map[string]string{attrPodName: "p", attrPodNamespace: "ns", attrPodUID: "u1"},
	}
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *rig) said() string {
	var all []string
	for {
		select {
		case e := <-r.events.Events:
			all = append(all, e)
		case <-time.After(50 * time.Millisecond):
			return strings.Join(all, "\n")
		}
	}
}

// What the agent has no part in passes as it is: unknown methods and fields,
// metadata, deadlines, and errors with their details.
func TestC22_TheProxyChangesNothing(t *testing.T) {
	r := newRig(t)
	req := request()
	req.VolumeContext = nil // podInfoOnMount is off
	req.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 4242, protowire.VarintType), 7))
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(r.ctx(), "x-kubelet", "yes"), 5*time.Second)
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
	if d := r.driver.deadline; d <= 0 || d > 5*time.Second {
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

// The driver is told of the pod what the kubelet does not tell, also where no
// sandbox has a part in it.
func TestC22_TheDriverIsToldOfThePod(t *testing.T) {
	policy, no := corev1.FSGroupChangeOnRootMismatch, false
	r := newRig(t, pod(func(p *corev1.Pod) {
		p.Spec.RuntimeClassName, p.Spec.HostUsers = nil, &no
		p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroupChangePolicy: &policy}
	}))
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if got := r.driver.last().GetVolumeContext(); got[attrPodPolicy] != "OnRootMismatch" || got[attrHostUsers] != "false" || len(got) != 5 {
		t.Errorf("%v", got)
	}
	// A class that says something itself is not overruled.
	req := request()
	req.VolumeContext[attrPodPolicy] = "Always"
	_, err = r.kubelet.NodePublishVolume(r.ctx(), req)
	ok(t, err)
	if got := r.driver.last().GetVolumeContext()[attrPodPolicy]; got != "Always" {
		t.Errorf("%q", got)
	}
	// A pod that nobody knows is not guessed at.
	req = request()
	req.VolumeContext[attrPodUID] = "another"
	if _, err = r.kubelet.NodePublishVolume(r.ctx(), req); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

func TestC21_C22_DeferredAndCarriedOut(t *testing.T) {
	gid, policy := int64(3000), corev1.FSGroupChangeAlways
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &gid, FSGroupChangePolicy: &policy}
	}))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request()) // the kubelet repeats itself
	ok(t, err)
	if said := r.said(); strings.Count(said, EventDeferred) != 1 {
		t.Errorf("events: %s", said)
	}
	// The kubelet grows a volume that was enlarged meanwhile before it asks for a
	// sandbox, and takes nothing but success.
	if r, err := r.kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target}); err != nil {
		t.Errorf("growth before there is a sandbox: %v %v", r, err)
	}
	if _, err := r.kubelet.NodeGetVolumeStats(r.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: target}); status.Code(err) != codes.Unavailable {
		t.Errorf("stats before there is a sandbox: %v", err)
	}
	sandbox := box{"sb", 1}
	if err := r.agent.missing("u1", "sb"); err == nil {
		t.Error("a container could start before the volume is there")
	}
	ok(t, r.agent.publishAll(r.ctx(), "u1", sandbox))
	ok(t, r.agent.publishAll(r.ctx(), "u1", sandbox))
	ok(t, r.agent.missing("u1", "sb"))
	got := r.runtime.Published("sb", "/dev/loop7")
	if got.GetHostTargetPath() != target || got.GetFileSystem() != "ext4" || !slices.Equal(got.GetMountOptions(), []string{"noatime"}) || got.GetFsgroupGid() != 3000 || got.GetFsgroupPolicy() != "Always" {
		t.Errorf("published %v", got)
	}
	stats, err := r.kubelet.NodeGetVolumeStats(r.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: target})
	ok(t, err)
	if len(stats.GetUsage()) == 0 || stats.GetUsage()[0].GetTotal() == 0 {
		t.Errorf("stats %v", stats)
	}
	const size = 1 << 30
	grown, err := r.kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
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

// C23: whoever fails on the way, the pod fails and is told, and the driver is not
// asked to mount instead.
func TestC23_NothingFallsBack(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimeGetCapabilities" {
			return status.Error(codes.Internal, "out of order")
		}
		return nil
	}
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "out of order") {
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
	if err := r.agent.publishAll(r.ctx(), "u1", box{"sb", 1}); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("%v", err)
	}
	if err := r.agent.missing("u1", "sb"); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("%v", err)
	}
	r.runtime.Fail = nil
	ok(t, r.agent.publishAll(r.ctx(), "u1", box{"sb", 1})) // it is tried again
}

// A publish that takes longer than a hook may goes on; containers wait for it,
// and NodeUnpublishVolume ends it.
func TestC24_ASlowPublish(t *testing.T) {
	const runtimePatience = 2 * time.Second // NRI's: then the runtime goes on without the plugin
	if hookPatience > runtimePatience*3/4 {
		t.Errorf("a hook waits for %s, and the runtime for %s", hookPatience, runtimePatience)
	}
	made := time.Now()
	r := deferredRig(t)
	usual := time.Since(made) // what calls take here
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
	ok(t, r.agent.publishAll(r.ctx(), "u1", box{"sb", 1}))
	if took := time.Since(begin); took > hookPatience+max(runtimePatience/5, 10*usual) {
		t.Errorf("the hook took %s; after %s the runtime goes on without the plugin", took, runtimePatience)
	}
	if err := r.agent.missing("u1", "sb"); err == nil || !strings.Contains(err.Error(), "is being mounted") {
		t.Errorf("%v", err)
	}
	close(release)
	for end := time.Now().Add(10 * time.Second); r.agent.missing("u1", "sb") != nil; time.Sleep(5 * time.Millisecond) {
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
		why     string // empty: no event
	}{
		"no RuntimeClass":  {objects: storage("true", corev1.ReadWriteOncePod), change: func(p *corev1.Pod) { p.Spec.RuntimeClassName = nil }},
		"the StorageClass": {objects: storage("false", corev1.ReadWriteOncePod), why: "StorageClass"},
		"the access mode":  {objects: storage("true", corev1.ReadWriteOnce), why: "ReadWriteOncePod"},
		"a subPath": {objects: storage("true", corev1.ReadWriteOncePod), why: "subPath",
			change: func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].SubPath = "a" }},
		"a block volume": {objects: storage("true", corev1.ReadWriteOncePod), why: "raw block", request: func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}},
		"an inline volume": {objects: storage("true", corev1.ReadWriteOncePod), why: "inline", request: func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[attrEphemeral] = "true" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(c.objects, pod(c.change))...)
			req := request()
			if c.request != nil {
				c.request(req)
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
