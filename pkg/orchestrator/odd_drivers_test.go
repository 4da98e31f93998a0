package orchestrator

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// named is a driver that says who it is, or hangs like one whose threads wait for a disk that is gone.
type named struct {
	csi.UnimplementedNodeServer
	name  string
	hangs atomic.Bool
}

func (n *named) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	if n.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &csi.NodeGetInfoResponse{NodeId: n.name}, nil
}

func listen(t *testing.T, path string, n *named) {
	t.Helper()
	_ = os.Remove(path) // as drivers do
	l, err := net.Listen("unix", path)
	ok(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	s := grpc.NewServer()
	csi.RegisterNodeServer(s, n)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
}

// A driver's process hangs (a thread in D state survives kill -9, and so do its sockets), and a new one has replaced its socket. A kubelet
// without the agent connects for each call and so reaches the new one. With the agent it reaches the old one for ever.
func TestC21_ADriverWhosePredecessorHangs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	old := &named{name: "old"}
	listen(t, path, old)
	conn, err := Dial("unix://" + path)
	ok(t, err)
	defer conn.Close()
	p := &Proxy{Driver: conn}
	kubelet := csi.NewNodeClient(dialer(t, serve(t, p.Server(), "agent.sock")))
	ask := func(c csi.NodeClient) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		return r.GetNodeId(), err
	}
	if name, err := ask(kubelet); name != "old" {
		t.Fatal(name, err)
	}
	old.hangs.Store(true)
	listen(t, path, &named{name: "new"})
	if name, err := ask(csi.NewNodeClient(dialer(t, "unix://"+path))); name != "new" {
		t.Fatal("a kubelet without the agent:", name, err)
	}
	if name, err := ask(kubelet); name != "new" {
		t.Errorf("through the agent: %q, %v", name, err)
	}
}

// A volume in the pod's spec that a kubelet translates to CSI (awsElasticBlockStore and others, CSI migration) has no PersistentVolume
// object. The kubelet says that it is not ephemeral.
func TestC21_AMigratedInlineVolume(t *testing.T) {
	r := newRig(t, pod(func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
			AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-1"}}}}
	}))
	req := request()
	req.TargetPath = "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~csi/ebs.csi.aws.com-vol-1/mount"
	req.VolumeContext[attrEphemeral] = "false"
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), req); err != nil {
		t.Errorf("the pod never starts: %v\n%s", err, r.said())
	}
}

// The pod gets another sandbox, with the volume at its old size, while the driver still grows the device.
func TestC06_AGrowthThatIsLostWithTheSandbox(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.SandboxStarted(r.ctx(), Sandbox{"sb1", "u1", 1}))
	grown := map[string]bool{}
	r.runtime.Fail = func(_ context.Context, call string, req proto.Message) error {
		if e, is := req.(*crustv1alpha1.RuntimeExpandVolumeRequest); is {
			if e.GetSandboxId() == "sb1" { // as a server does that does not know it any more
				return status.Error(codes.NotFound, "no such sandbox")
			}
			grown[e.GetSandboxId()] = true
		}
		return nil
	}
	hooked := &hookedDriver{ClientConnInterface: r.agent.Driver, before: func(method string) {
		if strings.HasSuffix(method, "NodeExpandVolume") {
			ok(t, r.agent.SandboxStarted(r.ctx(), Sandbox{"sb2", "u1", 2}))
		}
	}}
	conn := dialer(t, serve(t, (&Proxy{Driver: hooked, Handlers: r.agent.Proxy().Handlers}).Server(), "agent2.sock"))
	_, err := csi.NewNodeClient(conn).NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}})
	d, _ := r.agent.Records.Get(target)
	if !d.in("sb2") {
		t.Fatalf("%+v", d)
	}
	if err == nil && !grown["sb2"] {
		t.Error("the kubelet is told that the volume has grown, and nobody has grown its file system in the sandbox that has it")
	}
}

type hookedDriver struct {
	grpc.ClientConnInterface
	before func(method string)
}

func (h *hookedDriver) Invoke(ctx context.Context, method string, args, reply any, o ...grpc.CallOption) error {
	h.before(method)
	return h.ClientConnInterface.Invoke(ctx, method, args, reply, o...)
}

// A driver hands on the mount option rw of a class (KEP-2857 does not forbid it), and the pod only reads.
func TestR05_AReaderOfAVolumeThatIsMountedRW(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	r.driver.options = map[string]string{"rw": "", "noatime": ""}
	req := request()
	req.Readonly = true
	_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
	ok(t, err)
	d, _ := r.agent.Records.Get(target)
	if _, is := d.Options["rw"]; is {
		t.Errorf("the runtime is told %q, which crustd refuses as INVALID_ARGUMENT", crust.OptionList(d.Options))
	}
}
