// Package crust tests the CRUST server with real sandboxes, together with the
// real csi-node, in the order in which the kubelet of KEP-2857 would call them.
package crust

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestMain(m *testing.M) { testnode.Main(m) }

const size = 320 << 20

var filesystems = []string{"ext4", "xfs", "btrfs"}

// longest is what one call may take. A server with guests sets it to patience.
var longest = time.Minute

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*longest)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("want %s, got %v", code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

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
	t       testing.TB
	node    *testnode.Node
	client  *crust.Client
	backend string
	tags    string
	initrd  string // of its guests, instead of the one that was built
	env     []string
	args    []string
	cmd     *exec.Cmd
	log     *testnode.LogBuffer
}

func newServer(t testing.TB, backend, tags string, args ...string) *server {
	t.Helper()
	if backend == "qemu" {
		longest = patience(t)
	}
	s := &server{t: t, node: testnode.New(t, tags), backend: backend, tags: tags, args: args}
	t.Cleanup(s.cleanUp)
	s.start()
	return s
}

func (s *server) socket() string   { return filepath.Join(s.node.Dir, "crust.sock") }
func (s *server) stateDir() string { return filepath.Join(s.node.Dir, "crust") }

func (s *server) launch() {
	s.t.Helper()
	args := append([]string{
		"--endpoint", "unix://" + s.socket(), "--backend", s.backend, "--state-dir", s.stateDir(), "--kubelet-dir", s.node.KubeletDir(),
		"-v", "4", "--timeout", longest.String(),
	}, s.args...)
	if !strings.Contains(strings.Join(s.args, " "), "--allow-device") {
		args = append(args, "--allow-device", "/dev/loop*")
	}
	s.log = &testnode.LogBuffer{}
	s.cmd = testnode.LaunchCommand(s.t, "crustd", s.tags, s.env, s.log, args...)
}

func (s *server) start() {
	s.t.Helper()
	s.launch()
	var err error
	if s.client, err = crust.Dial("unix://" + s.socket()); err != nil {
		s.t.Fatal(err)
	}
	for deadline := time.Now().Add(longest); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, serr := os.Stat(s.socket()); serr != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		_, err = s.client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
		cancel()
		if err == nil {
			return
		}
	}
	s.t.Fatalf("crustd does not serve: %v\n%s", err, s.log.String())
}

// kill is kill -9.
func (s *server) kill() {
	if s.cmd != nil {
		s.client.Close()
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

func (s *server) stop() {
	s.t.Helper()
	if s.cmd != nil {
		s.client.Close()
		ok(s.t, s.cmd.Process.Signal(syscall.SIGTERM))
		if err := s.cmd.Wait(); err != nil {
			s.t.Errorf("crustd ended with %v\n%s", err, s.log.String())
		}
		s.cmd = nil
	}
}

func (s *server) restart() { s.t.Helper(); s.kill(); s.start() }

func (s *server) cleanUp() {
	if s.cmd == nil {
		s.env = nil
		s.start()
	}
	if s.t.Failed() {
		s.t.Logf("crustd said:\n%s", s.log.String())
	}
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	list, err := s.client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	if err != nil {
		s.t.Error(err)
	}
	for _, sb := range list.GetSandboxes() {
		s.t.Errorf("left registered: %s", sb.GetSandboxId())
		_, _ = s.client.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: sb.GetSandboxId()})
	}
	s.stop()
	// Nothing of it may be left, whatever became of it before.
	for _, dir := range []string{"sandboxes", "ns", "binds", "scratch"} {
		names, _ := os.ReadDir(filepath.Join(s.stateDir(), dir))
		for _, n := range names {
			s.t.Errorf("left in the state: %s/%s", dir, n.Name())
		}
	}
}

// volume makes and stages one that may be deferred.
func (s *server) volume(name, fstype string, options ...string) csiclient.Volume {
	s.t.Helper()
	v := csiclient.Volume{FSType: fstype, MountFlags: options, Context: map[string]string{"allowRuntimeAssistedMount": "true"}}
	made, err := s.node.Client.Create(ctxOf(s.t), name, size, v, nil, nil)
	ok(s.t, err)
	v.ID = made.GetVolumeId()
	ok(s.t, s.node.Client.Stage(ctxOf(s.t), v))
	return v
}

func (s *server) delete(v csiclient.Volume) {
	s.t.Helper()
	ok(s.t, s.node.Client.Unstage(ctxOf(s.t), v.ID))
	ok(s.t, s.node.Client.Delete(ctxOf(s.t), v.ID))
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
	return &pod{name: name, v: v, target: s.node.Target(name), asks: crust.PodVolume{Socket: s.socket(), Allowed: true, Exclusive: true}}
}

// decide is what the kubelet asks before it publishes.
func (s *server) decide(p *pod) crust.Decision {
	s.t.Helper()
	a := p.asks
	caps, err := s.client.RuntimeGetCapabilities(ctxOf(s.t), &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	ok(s.t, err)
	for _, c := range caps.GetCapabilities() {
		a.Capabilities = append(a.Capabilities, c.GetRpc().GetType())
	}
	fs, err := s.client.RuntimeGetSupportedFileSystems(ctxOf(s.t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	ok(s.t, err)
	a.Filesystems = fs.GetFileSystems()
	node, err := s.node.Client.NodeGetCapabilities(ctxOf(s.t), &csi.NodeGetCapabilitiesRequest{})
	ok(s.t, err)
	for _, c := range node.GetCapabilities() {
		a.NodeDefers = a.NodeDefers || c.GetRpc().GetType() == crust.NodeCapability
	}
	p.asks = a
	return crust.Decide(a)
}

// nodePublish is NodePublishVolume, with the runtime's file systems where the
// decision was to defer.
func (s *server) nodePublish(p *pod) error {
	s.t.Helper()
	if s.decide(p).Defer {
		return s.askNode(p, p.asks.Filesystems)
	}
	return s.askNode(p, nil)
}

// askNode is NodePublishVolume for a runtime that mounts these.
func (s *server) askNode(p *pod, filesystems []string) error {
	s.t.Helper()
	ok(s.t, os.MkdirAll(filepath.Dir(p.target), 0o750))
	req := &csi.NodePublishVolumeRequest{
		VolumeId: p.v.ID, StagingTargetPath: s.node.Client.StagingPath(p.v.ID), TargetPath: p.target,
		VolumeCapability: p.v.Capability(), Readonly: p.ro, VolumeContext: p.v.Context,
	}
	if len(filesystems) > 0 {
		ok(s.t, crust.SetSupportedFilesystems(req, filesystems))
		if s.backend == "namespace" { // as an orchestrator does whose runtime has HOST_KERNEL
			req.VolumeContext = maps.Clone(req.VolumeContext)
			req.VolumeContext["csi.crust.dev/runtimeKernel"] = "host"
		}
	}
	resp, err := s.node.Client.NodePublishVolume(ctxOf(s.t), req)
	if err != nil {
		return err
	}
	p.info, p.deferred, err = crust.MountInfoOf(resp)
	return err
}

func (p *pod) request() *crustv1alpha1.RuntimePublishVolumeRequest {
	r := &crustv1alpha1.RuntimePublishVolumeRequest{
		SandboxId: p.name, HostVolumeId: p.info.Source, HostTargetPath: p.target, FileSystem: p.info.Type, FsgroupGid: p.group, FsgroupPolicy: p.asks.GroupPolicy,
	}
	for k, v := range p.info.Options {
		if v != "" {
			k += "=" + v
		}
		r.MountOptions = append(r.MountOptions, k)
	}
	return r
}

func (s *server) runtimePublish(p *pod) error {
	_, err := s.client.RuntimePublishVolume(ctxOf(s.t), p.request())
	return err
}

func (s *server) nodeUnpublish(p *pod) {
	s.t.Helper()
	ok(s.t, s.node.Client.Unpublish(ctxOf(s.t), p.v.ID, p.target))
	if _, err := os.Lstat(p.target); !os.IsNotExist(err) {
		s.t.Errorf("%s is still there", p.target)
	}
}

func (s *server) deregister(p *pod) {
	s.t.Helper()
	for {
		_, err := s.client.DeregisterSandbox(ctxOf(s.t), &crustv1alpha1.DeregisterSandboxRequest{SandboxId: p.name})
		if status.Code(err) != codes.Aborted { // crustd does it itself when a sandbox has ended
			ok(s.t, err)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// onHost are the lines of the host's mount table that show the volume's device.
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
	// exec runs a shell command in it.
	exec(command string) (string, error)
	// path is where it sees what the host's target is.
	path(target string) string
	// kill ends it without asking.
	kill()
}

// sh is exec that must succeed.
func sh(t testing.TB, sb sandboxed, format string, args ...any) string {
	t.Helper()
	command := fmt.Sprintf(format, args...)
	out, err := sb.exec(command)
	if err != nil {
		t.Fatalf("in the sandbox: %s: %v\n%s", command, err, out)
	}
	return strings.TrimSpace(out)
}

// namespaced is a sandbox of the namespace backend. Its process stands for the
// one that holds a pod's namespaces.
type namespaced struct {
	t   testing.TB
	s   *server
	id  string
	cmd *exec.Cmd
}

func (s *server) namespace(p *pod) *namespaced {
	s.t.Helper()
	n := &namespaced{t: s.t, s: s, id: p.name, cmd: exec.Command("sleep", "3600")}
	ok(s.t, n.cmd.Start())
	s.t.Cleanup(func() { n.kill() })
	_, err := s.client.RegisterSandbox(ctxOf(s.t), &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: p.name, Pid: int64(n.cmd.Process.Pid), Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{}},
	})
	ok(s.t, err)
	return n
}

func (n *namespaced) kill() {
	if n.cmd.ProcessState == nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	}
}

func (n *namespaced) path(target string) string { return target }

func (n *namespaced) pin() string {
	list, err := n.s.client.ListSandboxes(ctxOf(n.t), &crustv1alpha1.ListSandboxesRequest{})
	ok(n.t, err)
	for _, sb := range list.GetSandboxes() {
		if sb.GetSandboxId() == n.id {
			return sb.GetMountNamespace()
		}
	}
	n.t.Fatalf("sandbox %s is not registered", n.id)
	return ""
}

func (n *namespaced) exec(command string) (string, error) {
	out, err := exec.Command("nsenter", "--mount="+n.pin(), "sh", "-c", command).CombinedOutput()
	return string(out), err
}
