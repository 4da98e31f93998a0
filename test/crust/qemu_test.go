package crust

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/microvm"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// guestDir holds what `make guest` built.
func guestDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../../.cache/guest")
	ok(t, err)
	if _, err := os.Stat(dir + "/initramfs"); err != nil {
		t.Fatal("no guest: run `make guest`")
	}
	return dir
}

// machine is a sandbox of the qemu backend.
type machine struct {
	t  testing.TB
	s  *server
	id string
	vm *microvm.VM
}

// boot starts a microVM and registers it.
func (s *server) boot(p *pod, kind, more string) *machine {
	s.t.Helper()
	dir, err := os.MkdirTemp("", "vm")
	ok(s.t, err)
	s.t.Cleanup(func() { ok(s.t, os.RemoveAll(dir)) })
	g := guestDir(s.t)
	initrd := g + "/initramfs"
	if s.initrd != "" {
		initrd = s.initrd
	}
	vm, err := microvm.Start(ctxOf(s.t), microvm.Config{
		Dir: dir, Kernel: g + "/vmlinuz", Initrd: initrd, Machine: kind, Accel: accel(s.t), Append: more, DieWithParent: true,
	})
	ok(s.t, err)
	m := &machine{t: s.t, s: s, id: p.name, vm: vm}
	s.t.Cleanup(func() {
		if s.t.Failed() {
			if b, err := os.ReadFile(vm.Console); err == nil {
				s.t.Logf("the guest's console:\n%s", b[max(0, len(b)-4000):])
			}
		}
		m.kill()
	})
	m.register()
	return m
}

var chosen string

func accel(t testing.TB) string {
	if chosen == "" {
		chosen = microvm.Accelerator(context.Background(), guestDir(t)+"/vmlinuz")
	}
	return chosen
}

func (m *machine) register() {
	m.t.Helper()
	magic, err := hex.DecodeString(m.vm.Magic)
	ok(m.t, err)
	_, err = m.s.client.RegisterSandbox(ctxOf(m.t), &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: m.id, Pid: int64(m.vm.PID),
		Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: m.vm.QMP, ChannelSocket: m.vm.Channel, ChannelMagic: magic}},
	})
	ok(m.t, err)
}

func (m *machine) kill() { m.vm.Kill() }

func (m *machine) path(target string) string {
	list, err := m.s.client.ListSandboxes(ctxOf(m.t), &crustv1alpha1.ListSandboxesRequest{})
	ok(m.t, err)
	for _, sb := range list.GetSandboxes() {
		for _, v := range sb.GetVolumes() {
			if sb.GetSandboxId() == m.id && v.GetHostTargetPath() == target {
				return v.GetSandboxPath()
			}
		}
	}
	m.t.Fatalf("sandbox %s has nothing of %s", m.id, target)
	return ""
}

func (m *machine) exec(command string) (string, error) {
	r, err := m.s.client.ExecInSandbox(ctxOf(m.t), &crustv1alpha1.ExecInSandboxRequest{SandboxId: m.id, Argv: []string{"/bin/sh", "-c", command}})
	if err == nil && r.GetExitCode() != 0 {
		err = fmt.Errorf("exit status %d", r.GetExitCode())
	}
	return string(r.GetOutput()), err
}

// acquaint has the server meet a guest, so that it knows what guests can.
func (s *server) acquaint() {
	s.t.Helper()
	p := &pod{name: "acquaintance"}
	m := s.boot(p, "q35", "")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		fs, err := s.client.RuntimeGetSupportedFileSystems(ctxOf(s.t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		ok(s.t, err)
		if len(fs.GetFileSystems()) > 0 {
			break
		}
		if time.Now().After(deadline) {
			s.t.Fatal("the guest does not tell its file systems")
		}
	}
	s.deregister(p)
	m.kill()
}

func TestC12_C14_C16_C17_C18_Story1InAMicroVM(t *testing.T) {
	s := newServer(t, "qemu", "")
	// Nothing is promised before a guest said what it can.
	fs, err := s.client.RuntimeGetSupportedFileSystems(ctxOf(t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	ok(t, err)
	if len(fs.GetFileSystems()) != 0 {
		t.Errorf("%v, of no guest", fs.GetFileSystems())
	}
	s.acquaint()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			s.t = t
			defer func() { s.t = t }()
			story1(t, s, func(p *pod) sandboxed { return s.boot(p, "q35", "") }, fs)
		})
	}
	t.Run("on a microvm machine", func(t *testing.T) {
		s.t = t
		story1(t, s, func(p *pod) sandboxed { p.name += "-micro"; return s.boot(p, "microvm", "") }, "ext4")
	})
	s.t = t
}

func TestC18_C19_AQEMUThatDies(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	// The kernel lets nobody else have the device, whatever crustd knows.
	s.kill()
	if out, err := os.OpenFile(p.info.Source, os.O_RDWR|os.O_EXCL, 0); err == nil {
		out.Close()
		t.Error("the device is not claimed")
	}
	s.start()
	sh(t, m, "echo kept > %s/f; sync", m.path(p.target))
	events, err := s.client.Watch(ctxOf(t), &crustv1alpha1.WatchRequest{})
	ok(t, err)
	_, err = events.Header()
	ok(t, err)
	m.kill()
	for {
		e, err := events.Recv()
		ok(t, err)
		if e.GetEvent() == crustv1alpha1.WatchResponse_SANDBOX_GONE {
			break
		}
	}
	// Elsewhere afterwards: here, in another guest.
	q := s.pod("second", v)
	s.nodeUnpublish(p)
	ok(t, s.nodePublish(q))
	m2 := s.boot(q, "q35", "")
	ok(t, s.runtimePublish(q))
	if out := sh(t, m2, "cat %s/f", m2.path(q.target)); out != "kept" {
		t.Errorf("the second guest reads %q", out)
	}
	s.deregister(q)
	s.nodeUnpublish(q)
	s.delete(v)
}

func TestAFileSystemThatTheGuestCannotMount(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	// Its group descriptors are noise: the superblock is well, the mount fails.
	run(t, "dd", "if=/dev/urandom", "of="+p.info.Source, "bs=4096", "seek=1", "count=4", "conv=fsync", "status=none")
	err := s.runtimePublish(p)
	refused(t, err, codes.FailedPrecondition, "in the guest", "ext4", "damaged")
	if out := sh(t, m, "cat /proc/mounts"); strings.Contains(out, "/run/crust/volumes/") {
		t.Errorf("left mounted: %s", out)
	}
	// An option that the guest's kernel does not take comes back with its words.
	w := s.volume("b", "ext4", "stripe=x")
	q := s.pod("pod2", w)
	ok(t, s.nodePublish(q))
	q.name = p.name
	refused(t, s.runtimePublish(q), codes.InvalidArgument, "stripe", "kernel says")
	// And the guest is as good as ever.
	x := s.volume("c", "xfs")
	r := s.pod("pod3", x)
	ok(t, s.nodePublish(r))
	r.name = p.name
	ok(t, s.runtimePublish(r))
	s.deregister(p)
	for _, pd := range []*pod{p, q, r} {
		s.nodeUnpublish(pd)
		s.delete(pd.v)
	}
}

// An agent that is killed, and a guest without memory, are not the end of it.
func TestAnAgentThatIsKilled(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	at := m.path(p.target)
	sh(t, m, "echo kept > %s/f", at)
	agent := func() string {
		return sh(t, m, `for p in /proc/[0-9]*; do [ "$(readlink $p/exe)" = /init ] && [ $p != /proc/1 ] && echo ${p#/proc/}; done; true`)
	}
	for range 3 {
		pid := agent()
		_, _ = m.exec("kill -9 " + pid) // its own answer is lost
		if out := sh(t, m, "cat %s/f", at); out != "kept" {
			t.Errorf("after the agent's end: %q", out)
		}
		if now := agent(); now == pid {
			t.Errorf("the agent %s was not killed", pid)
		}
		ok(t, s.runtimePublish(p)) // it finds the volume mounted
	}
	// And crustd: the sandbox is found again, and its volume in it.
	s.restart()
	ok(t, s.runtimePublish(p))
	st, err := s.client.RuntimeGetVolumeStats(ctxOf(t), &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	ok(t, err)
	if st.GetUsage()[0].GetTotal() == 0 {
		t.Error("no stats")
	}
	// Something eats all memory: whatever the kernel kills, the volume stays, and
	// can be taken away.
	_, _ = m.exec("mkdir -p /tmp/eat && mount -t tmpfs -o size=2G none /tmp/eat && dd if=/dev/zero of=/tmp/eat/f bs=1M 2>/dev/null; rm -f /tmp/eat/f")
	if out, err := m.exec("rm -f /tmp/eat/f; cat " + at + "/f"); err != nil || strings.TrimSpace(out) != "kept" {
		if !m.gone() {
			t.Errorf("after it ran out of memory: %v %s", err, out)
		}
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.delete(v)
}

func (m *machine) gone() bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.vm.PID))
	return err != nil || strings.Contains(string(b), ") Z ")
}

// A file system that takes the guest's kernel with it: the host lives, the error
// says what happened, and the volume can be published elsewhere.
func TestAFileSystemThatEndsTheGuest(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4", "errors=panic")
	// A directory whose block is noise: the mount is well, looking is not.
	v.Context = nil
	ok(t, s.node.Client.Publish(ctxOf(t), v, s.node.Target("host"), false))
	ok(t, os.Mkdir(s.node.Target("host")+"/victim", 0o755))
	ok(t, os.WriteFile(s.node.Target("host")+"/victim/f", []byte("x"), 0o644))
	ok(t, s.node.Client.Unpublish(ctxOf(t), v.ID, s.node.Target("host")))
	v.Context = map[string]string{"allowRuntimeAssistedMount": "true"}
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	block := strings.Fields(run(t, "sh", "-c", "debugfs -R 'blocks /victim' "+p.info.Source+" 2>/dev/null"))[0]
	blockSize := strings.Fields(run(t, "sh", "-c", "dumpe2fs -h "+p.info.Source+" 2>/dev/null | grep '^Block size'"))[2]
	run(t, "dd", "if=/dev/urandom", "of="+p.info.Source, "bs="+blockSize, "seek="+block, "count=1", "conv=notrunc,fsync", "status=none")
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	_, err := m.exec("ls -la " + m.path(p.target) + "/victim")
	if err == nil {
		t.Fatal("the guest did not notice")
	}
	for deadline := time.Now().Add(20 * time.Second); !m.gone(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the guest lives: %v", err)
		}
	}
	m.kill()
	if !strings.Contains(err.Error(), "the microVM has ended") {
		t.Errorf("the error: %v", err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		list, err := s.client.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
		ok(t, err)
		if len(list.GetSandboxes()) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the sandbox is still listed")
		}
	}
	s.nodeUnpublish(p)
	// Elsewhere: the node looks first, and a person is asked for, or it is mended.
	ok(t, s.node.Client.Unstage(ctxOf(t), v.ID))
	if err := s.node.Client.Stage(ctxOf(t), v); err != nil {
		refused(t, err, codes.FailedPrecondition, "needs a person")
	}
	s.delete(v)
}

func TestADeviceThatIsGone(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	q := *p
	q.info.Source = "/dev/loop-that-is-gone"
	refused(t, s.runtimePublish(&q), codes.FailedPrecondition, "does not exist")
	ok(t, s.runtimePublish(p))
	_ = m
	s.deregister(p)
	s.nodeUnpublish(p)
	s.delete(v)
}

// C15 where the sandbox has a kernel of its own: the path that the guest answers
// shows the directory, and one that leads out is refused.
func TestC15_SubPathsInAGuest(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	sh(t, m, "cd %s && mkdir -p sub/dir && echo deep > sub/dir/f && ln -s sub/dir inside && ln -s / outside && ln -s ../../../.. up", m.path(p.target))
	resolve := func(source string) (*crustv1alpha1.ResolveMountResponse, error) {
		return s.client.ResolveMount(ctxOf(t), &crustv1alpha1.ResolveMountRequest{SandboxId: p.name, Source: source})
	}
	for _, sub := range []string{"", "/sub/dir", "/inside", "/inside"} {
		r, err := resolve(p.target + sub)
		ok(t, err)
		file := "f"
		if sub == "" {
			file = "sub/dir/f"
		}
		if out := sh(t, m, "cat %s/%s", r.GetPath(), file); out != "deep" || r.GetForeign() {
			t.Errorf("%q: %s %q", sub, r, out)
		}
	}
	for _, sub := range []string{"/outside", "/outside/etc", "/up"} {
		_, err := resolve(p.target + sub)
		refused(t, err, codes.InvalidArgument, "leads out of the volume")
	}
	_, err := resolve(p.target + "/none")
	refused(t, err, codes.FailedPrecondition, "does not exist")
	// Cleaned as a path, this is another place of the host.
	for _, other := range []string{p.target + "/../other", p.target + "-not", "/etc"} {
		r, err := resolve(other)
		ok(t, err)
		if !r.GetForeign() {
			t.Errorf("%s: %s", other, r)
		}
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.delete(v)
}

func TestR05_ReadOnlyInAGuest(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.volume("a", "xfs")
	p := s.pod("pod", v)
	p.ro = true
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	before := run(t, "sha256sum", p.info.Source)
	ok(t, s.runtimePublish(p))
	if out, err := m.exec("touch " + m.path(p.target) + "/f"); err == nil || !strings.Contains(out, "Read-only file system") {
		t.Errorf("%v %s", err, out)
	}
	// Nor through the disk: it is read-only itself.
	if out, err := m.exec("dd if=/dev/zero of=/dev/sda bs=4096 count=1"); err == nil {
		t.Errorf("the disk was written: %s", out)
	}
	s.deregister(p)
	if after := run(t, "sha256sum", p.info.Source); after != before {
		t.Error("the volume changed")
	}
	s.nodeUnpublish(p)
	s.delete(v)
}

func TestS10_ALabelReachesTheGuest(t *testing.T) {
	s := newServer(t, "qemu", "")
	// The guest's initramfs, with a policy behind it: the kernel unpacks both.
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/tree/etc/selinux", 0o755))
	run(t, "checkpolicy", "-M", "-U", "allow", "-c", "33", "-o", dir+"/tree/etc/selinux/policy", "testdata/policy.conf")
	run(t, "sh", "-c", fmt.Sprintf("cd %s/tree && find . | cpio --quiet -o -H newc > ../more && cat %s/initramfs ../more > ../initramfs", dir, guestDir(t)))
	s.initrd = dir + "/initramfs"
	const selinux = "security=selinux selinux=1 enforcing=0"
	first := &pod{name: "first"}
	m := s.boot(first, "q35", selinux)
	label := "system_u:object_r:svirt_image_t:s0:c1,c2"
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		p := &pod{}
		s.decide(p)
		if has(p, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT) && len(p.asks.Filesystems) > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the guest does not say that it has SELinux")
		}
	}
	for _, fs := range filesystems {
		v := s.volume(fs, fs, "context="+label)
		p := s.pod("pod-"+fs, v)
		p.asks.Label, p.asks.LabelOnMount = true, true
		ok(t, s.nodePublish(p))
		if !p.deferred || p.info.Options["context"] != label {
			t.Fatalf("%v %+v", p.deferred, p.info)
		}
		p.name = first.name
		ok(t, s.runtimePublish(p))
		at := m.path(p.target)
		sh(t, m, "echo x > %s/f", at)
		if out := sh(t, m, "grep %s /proc/mounts", at); !strings.Contains(out, `context="`+label+`"`) && !strings.Contains(out, "context="+label) {
			t.Errorf("%s in the guest: %s", fs, out)
		}
		_, err := s.client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
		ok(t, err)
		// A label that the guest's policy does not have comes back as such.
		p.info.Options["context"] = "system_u:object_r:no_such_t:s0"
		refused(t, s.runtimePublish(p), codes.InvalidArgument, "label")
		s.nodeUnpublish(p)
		s.delete(v)
	}
	s.deregister(first)
}

// A thousand calls over one port, of which none is lost.
func TestAThousandCallsToAGuest(t *testing.T) {
	s := newServer(t, "qemu", "", "--timeout", "15s")
	s.acquaint()
	v := s.volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	for i := range 500 {
		_, err := s.client.ExecInSandbox(ctxOf(t), &crustv1alpha1.ExecInSandboxRequest{SandboxId: p.name})
		if status.Code(err) != codes.InvalidArgument {
			t.Fatalf("call %d: %v", i, err)
		}
		if _, err := s.client.RuntimeGetVolumeStats(ctxOf(t), &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source}); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.delete(v)
}

// As a service beside whatever else a guest runs, and over vsock: the kernel's
// loopback stands for the hypervisor, which this machine does not have for it.
func TestTheAgentAsAServiceOverVsock(t *testing.T) {
	s := newServer(t, "qemu", "")
	p := &pod{name: "vm"}
	m := s.boot(p, "q35", "")
	sh(t, m, "modprobe vsock_loopback")
	sh(t, m, "(/init -dir /tmp/service -listen vsock:1024 -vsock-peer 1 > /tmp/service.log 2>&1 &) ; (/init -dir /tmp/other -listen vsock:1025 > /tmp/other.log 2>&1 &)")
	if out := sh(t, m, "sleep 1; /init -ask vsock:1:1024"); !strings.Contains(out, "ext4") {
		t.Errorf("%s\n%s", out, sh(t, m, "cat /tmp/service.log"))
	}
	// Only the host is let in, unless it is said otherwise.
	if out, err := m.exec("timeout 3 /init -ask vsock:1:1025"); err == nil {
		t.Errorf("a process of the guest was let in: %s", out)
	}
	s.deregister(p)
}
