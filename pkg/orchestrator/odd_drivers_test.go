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

// another is a driver that was replaced while a sandbox has a volume.
type another struct {
	grpc.ClientConnInterface
	source    string // by this name it leaves the volume to the runtime
	never     bool   // it does not defer, and mounts
	published int
}

func (d *another) Invoke(ctx context.Context, method string, args, reply any, o ...grpc.CallOption) error {
	err := d.ClientConnInterface.Invoke(ctx, method, args, reply, o...)
	switch r := reply.(type) {
	case *csi.NodeGetCapabilitiesResponse:
		if d.never {
			r.Capabilities = nil
		}
	case *message:
		if err == nil && strings.HasSuffix(method, "NodePublishVolume") {
			d.published++
			answer := &csi.NodePublishVolumeResponse{}
			if !d.never {
				err = crust.SetMountInfo(answer, crust.MountInfo{Source: d.source, Type: "ext4"})
			}
			r.bytes = answer.ProtoReflect().GetUnknown()
		}
	}
	return err
}

// kubelet returns a kubelet's client of an agent whose driver was replaced.
func (d *another) kubelet(r *rig) csi.NodeClient {
	r.t.Helper()
	conn := r.agent.Driver.(*Connection)
	d.ClientConnInterface, r.agent.Driver = conn, d
	return csi.NewNodeClient(dialer(r.t, serve(r.t, r.agent.Proxy().Server(), "agent2.sock")))
}

// A driver was updated, and has other names for devices (by-id, for example). The sandbox has the volume by its earlier name, and only by
// that can it be asked for it and told to let go of it.
func TestC22_C24_ADriverThatNamesADeviceOtherwise(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.SandboxStarted(r.ctx(), Sandbox{"sb", "u1", 1}))
	kubelet := (&another{source: "/dev/disk/by-id/seven"}).kubelet(r)
	_, err := kubelet.NodePublishVolume(r.ctx(), request())
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "/dev/disk/by-id/seven") ||
		!strings.Contains(err.Error(), "/dev/loop7") {
		t.Errorf("published again: %v", err)
	}
	_, err = kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	ok(t, err)
	if got := r.runtime.Published("sb", "/dev/loop7"); got != nil {
		t.Errorf("the kubelet is told that nobody has it, and the sandbox has %v", got)
	}
	// Before a sandbox has the volume, the last answer counts.
	_, err = kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	ok(t, r.agent.SandboxStarted(r.ctx(), Sandbox{"sb2", "u1", 2}))
	if r.runtime.Published("sb2", "/dev/disk/by-id/seven") == nil {
		t.Error("it is not published by its new name")
	}
	// The rig's driver answers these by the earlier one.
	_, err = kubelet.NodeGetVolumeStats(r.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: target})
	if err != nil {
		t.Errorf("stats: %v", err)
	}
	const size = 3 << 30
	grown, err := kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	if err != nil || grown.GetCapacityBytes() != size {
		t.Errorf("the sandbox's file system is to grow: %v, %v", grown, err)
	}
}

// A driver was replaced by one that never defers, and a kubelet that was restarted publishes again what runs. The driver would mount what
// the sandbox has mounted.
func TestC23_ADriverThatDefersNoMore(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.SandboxStarted(r.ctx(), Sandbox{"sb", "u1", 1}))
	d := &another{never: true}
	_, err := d.kubelet(r).NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if d.published > 0 {
		t.Error("the node mounts the volume beside the sandbox")
	}
	if r.runtime.Published("sb", "/dev/loop7") == nil {
		t.Error("the sandbox has lost it")
	}
	if said := r.said(); strings.Contains(said, EventMountedByHost) {
		t.Errorf("events: %s", said)
	}
	ok(t, r.agent.missing("u1", "sb"))
}
