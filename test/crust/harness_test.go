// Package crust tests the CRUST server with real sandboxes, together with the real csi-node, in the
// order of calls of KEP-2857's kubelet.
package crust

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestMain(m *testing.M) {
	testnode.AtOnce(3) // guests are emulated if there is no KVM
	testnode.Main(m)
}

const size = testcrust.Size

var filesystems = []string{"ext4", "xfs", "btrfs"}

// Helpers of every test.
var (
	ok         = testcrust.OK
	refused    = testcrust.Refused
	ctxOf      = testcrust.Context
	eventually = testcrust.Eventually
)

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// server is a crustd beside a csi-node.
type server struct {
	*testcrust.Server
	initrd string // of its guests, instead of the default
}

func newServer(t testing.TB, backend, tags string, args ...string) *server {
	t.Helper()
	if backend == "qemu" {
		testcrust.Allow(patience(t))
	}
	return &server{Server: testcrust.NewServer(t, testnode.New(t, tags), backend, testnode.BuildCommand(t, "crustd", tags), args...)}
}

// pod is what the kubelet knows of a pod with one volume.
type pod struct {
	name   string
	v      csiclient.Volume
	target string
	asks   crust.PodVolume
	group  *uint32
	ro     bool

	deferred bool
	info     crust.MountInfo
}

func (s *server) pod(name string, v csiclient.Volume) *pod {
	return &pod{name: name, v: v, target: s.Node.Target(name), asks: crust.PodVolume{Socket: s.Socket(), Allowed: true, Exclusive: true}}
}

// decide makes the kubelet's decision before it publishes.
func (s *server) decide(p *pod) crust.Decision {
	s.T.Helper()
	a := p.asks
	caps, err := s.Client.RuntimeGetCapabilities(ctxOf(s.T), &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	ok(s.T, err)
	for _, c := range caps.GetCapabilities() {
		a.Capabilities = append(a.Capabilities, c.GetRpc().GetType())
	}
	fs, err := s.Client.RuntimeGetSupportedFileSystems(ctxOf(s.T), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	ok(s.T, err)
	a.Filesystems = fs.GetFileSystems()
	node, err := s.Node.Client.NodeGetCapabilities(ctxOf(s.T), &csi.NodeGetCapabilitiesRequest{})
	ok(s.T, err)
	for _, c := range node.GetCapabilities() {
		a.NodeDefers = a.NodeDefers || c.GetRpc().GetType() == crust.NodeCapability
	}
	p.asks = a
	return crust.Decide(a)
}

// nodePublish calls NodePublishVolume, with the runtime's file systems if the decision was to
// defer.
func (s *server) nodePublish(p *pod) error {
	s.T.Helper()
	if s.decide(p).Defer {
		return s.askNode(p, p.asks.Filesystems)
	}
	return s.askNode(p, nil)
}

// askNode calls NodePublishVolume for a runtime with these file systems.
func (s *server) askNode(p *pod, filesystems []string) error {
	s.T.Helper()
	ok(s.T, os.MkdirAll(filepath.Dir(p.target), 0o750))
	req := &csi.NodePublishVolumeRequest{
		VolumeId: p.v.ID, StagingTargetPath: s.Node.Client.StagingPath(p.v.ID), TargetPath: p.target,
		VolumeCapability: p.v.Capability(), Readonly: p.ro, VolumeContext: p.v.Context,
	}
	if len(filesystems) > 0 {
		ok(s.T, crust.SetSupportedFilesystems(req, filesystems))
		if s.Backend == "namespace" { // as an orchestrator whose runtime has HOST_KERNEL
			req.VolumeContext = maps.Clone(req.VolumeContext)
			req.VolumeContext["csi.crust.dev/runtimeKernel"] = "host"
		}
	}
	resp, err := s.Node.Client.NodePublishVolume(ctxOf(s.T), req)
	if err != nil {
		return err
	}
	p.info, p.deferred, err = crust.MountInfoOf(resp)
	return err
}

func (p *pod) request() *crustv1alpha1.RuntimePublishVolumeRequest {
	r := &crustv1alpha1.RuntimePublishVolumeRequest{
		SandboxId: p.name, HostVolumeId: p.info.Source, HostTargetPath: p.target, FileSystem: p.info.Type, FsgroupGid: p.group,
		FsgroupPolicy: p.asks.GroupPolicy, MountOptions: crust.OptionList(p.info.Options),
	}
	return r
}

func (s *server) runtimePublish(p *pod) error {
	_, err := s.Client.RuntimePublishVolume(ctxOf(s.T), p.request())
	return err
}

func (s *server) nodeUnpublish(p *pod) {
	s.T.Helper()
	ok(s.T, s.Node.Client.Unpublish(ctxOf(s.T), p.v.ID, p.target))
	if _, err := os.Lstat(p.target); !os.IsNotExist(err) {
		s.T.Errorf("%s is still there", p.target)
	}
}

func (s *server) deregister(p *pod) {
	s.T.Helper()
	for {
		_, err := s.Client.DeregisterSandbox(ctxOf(s.T), &crustv1alpha1.DeregisterSandboxRequest{SandboxId: p.name})
		if status.Code(err) != codes.Aborted { // crustd unpublishes by itself when a sandbox ends
			ok(s.T, err)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// onHost returns the lines of the host's mount table that show the volume's device.
func onHost(t testing.TB, source string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	ok(t, err)
	var lines []string
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " "+source+" ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// sandboxed is a running sandbox of either kind.
type sandboxed interface {
	// Exec runs a shell command in the sandbox.
	Exec(command string) (string, error)
	// Path returns where the sandbox sees the host's target.
	Path(target string) string
	// Kill ends the sandbox without asking.
	Kill()
}

// sh is an Exec that must succeed.
func sh(t testing.TB, sb sandboxed, format string, args ...any) string {
	t.Helper()
	command := fmt.Sprintf(format, args...)
	out, err := sb.Exec(command)
	if err != nil {
		t.Fatalf("in the sandbox: %s: %v\n%s", command, err, out)
	}
	return strings.TrimSpace(out)
}

// namespace starts and registers a sandbox of the namespace backend.
func (s *server) namespace(p *pod) *testcrust.Holder {
	s.T.Helper()
	n := s.NewHolder(s.T, p.name)
	_, err := s.Client.RegisterSandbox(ctxOf(s.T), &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: p.name, Pid: int64(n.Cmd.Process.Pid),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{}},
	})
	ok(s.T, err)
	return n
}
