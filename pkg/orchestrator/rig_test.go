package orchestrator

import (
	"context"
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

// driver is a CSI driver that defers ext4 and records its calls.
type driver struct {
	csi.UnimplementedNodeServer
	mu        sync.Mutex
	published []*csi.NodePublishVolumeRequest
	deferred  map[string]bool
	md        metadata.MD
	deadline  time.Duration
	fail      error
	options   map[string]string

	noSubPaths bool // its placeholders have no directories
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range []csi.NodeServiceCapability_RPC_Type{crust.NodeCapability, crust.SubPathCapability} {
		if c != crust.SubPathCapability || !d.noSubPaths {
			resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
				Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}},
			})
		}
	}
	return resp, nil
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

// sandboxes is the runtime's SandboxManagement, as busy as a test sets it.
type sandboxes struct {
	*crusttest.Server
	asked, busy atomic.Int32
	fail        atomic.Bool
	register    func(*crustv1alpha1.RegisterSandboxRequest) error // nil: all are accepted
}

func (s *sandboxes) RegisterSandbox(
	_ context.Context, r *crustv1alpha1.RegisterSandboxRequest,
) (*crustv1alpha1.RegisterSandboxResponse, error) {
	if s.register != nil {
		return &crustv1alpha1.RegisterSandboxResponse{}, s.register(r)
	}
	return &crustv1alpha1.RegisterSandboxResponse{}, nil
}

func (s *sandboxes) UnpublishVolume(
	ctx context.Context, r *crustv1alpha1.UnpublishVolumeRequest,
) (*crustv1alpha1.UnpublishVolumeResponse, error) {
	if s.fail.Load() {
		return nil, status.Error(codes.Unavailable, "restarting")
	}
	if s.asked.Add(1) <= s.busy.Load() {
		return nil, status.Error(codes.Aborted, "busy with it")
	}
	return s.Server.UnpublishVolume(ctx, r)
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

// tracings are those of a rig's processes; nil turns one off.
type tracings struct{ agent, driver, runtime *otlp.Tracing }

func newTracedRig(t testing.TB, traces tracings, objects ...runtime.Object) *rig {
	t.Helper()
	r := &rig{t: t, driver: &driver{deferred: map[string]bool{}, options: map[string]string{"noatime": ""}}, runtime: crusttest.New(),
		events: eventrecorder.NewFakeRecorder(100), records: t.TempDir()}
	r.manager = &sandboxes{Server: r.runtime}
	ds := grpc.NewServer(traces.driver.Server()...)
	csi.RegisterNodeServer(ds, r.driver)
	own := serve(t, ds, "csi.sock")
	rs := grpc.NewServer(traces.runtime.Server()...)
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(rs, r.runtime)
	crustv1alpha1.RegisterSandboxManagementServer(rs, r.manager)
	socket := serve(t, rs, "crust.sock")
	objects = append(objects, &nodev1.RuntimeClass{
		ObjectMeta: metav1.ObjectMeta{Name: "sandbox", Annotations: map[string]string{SocketAnnotation: socket}}, Handler: "h",
	})
	r.cluster = fake.NewClientset(objects...)
	ctx, cancel := context.WithCancel(context.Background())
	records, err := LoadRecords(r.records, "boot")
	ok(t, err)
	conn, err := Dial(own, traces.agent.Client()...)
	ok(t, err)
	t.Cleanup(func() { conn.Close() })
	r.agent, err = New(Config{
		Driver: conn, Pods: WatchPods(ctx, r.cluster, "node"), Records: records, Events: r.events,
		Tracer: traces.agent.Tracer(), DialOptions: traces.agent.Client(),
	})
	ok(t, err)
	r.agent.hookPatience = time.Minute // on a busy machine writing records may take long
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
		Volumes: []corev1.Volume{{Name: "v",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}}},
	}}
	if change != nil {
		change(p)
	}
	return p
}

func storage(allow string, mode corev1.PersistentVolumeAccessMode) []runtime.Object {
	return []runtime.Object{
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-1"}, Spec: corev1.PersistentVolumeSpec{
			StorageClassName: "class", AccessModes: []corev1.PersistentVolumeAccessMode{mode},
			ClaimRef: &corev1.ObjectReference{Namespace: "ns", Name: "claim"},
		}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "class"}, Parameters: map[string]string{crust.AllowParameter: allow}},
	}
}

func request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: "vol", TargetPath: target,
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}},
		VolumeContext:    map[string]string{attrPodName: "p", attrPodNamespace: "ns", attrPodUID: "u1"},
	}
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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
