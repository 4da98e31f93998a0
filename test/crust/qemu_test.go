package crust

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestC12_C14_C16_C17_C18_Story1InAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	// The server promises nothing before a guest has reported its capabilities.
	fs, err := s.Client.RuntimeGetSupportedFileSystems(ctxOf(t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	ok(t, err)
	if len(fs.GetFileSystems()) != 0 {
		t.Errorf("%v, of no guest", fs.GetFileSystems())
	}
	s.acquaint()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			s.T = t
			defer func() { s.T = t }()
			story1(t, s, func(p *pod) sandboxed { return s.boot(p, "q35", "") }, fs)
		})
	}
	t.Run("on a microvm machine", func(t *testing.T) {
		s.T = t
		story1(t, s, func(p *pod) sandboxed { p.name += "-micro"; return s.boot(p, "microvm", "") }, "ext4")
	})
	s.T = t
}

func TestC18_C19_AQEMUThatDies(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	// The kernel gives the device to nobody else, whatever crustd knows.
	s.Kill()
	if out, err := os.OpenFile(p.info.Source, os.O_RDWR|os.O_EXCL, 0); err == nil {
		out.Close()
		t.Error("the device is not claimed")
	}
	s.Start()
	sh(t, m, "echo kept > %s/f; sync", m.Path(p.target))
	events, err := s.Client.Watch(ctxOf(t), &crustv1alpha1.WatchRequest{})
	ok(t, err)
	_, err = events.Header()
	ok(t, err)
	m.Kill()
	for {
		e, err := events.Recv()
		ok(t, err)
		if e.GetEvent() == crustv1alpha1.WatchResponse_SANDBOX_GONE {
			break
		}
	}
	// Afterwards another guest can have it.
	q := s.pod("second", v)
	s.nodeUnpublish(p)
	ok(t, s.nodePublish(q))
	m2 := s.boot(q, "q35", "")
	ok(t, s.runtimePublish(q))
	if out := sh(t, m2, "cat %s/f", m2.Path(q.target)); out != "kept" {
		t.Errorf("the second guest reads %q", out)
	}
	s.deregister(q)
	s.nodeUnpublish(q)
	s.Delete(v)
}

func TestAFileSystemThatTheGuestCannotMount(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	// Its group descriptors are noise: the superblock is valid, the mount fails.
	run(t, "dd", "if=/dev/urandom", "of="+p.info.Source, "bs=4096", "seek=1", "count=4", "conv=fsync", "status=none")
	err := s.runtimePublish(p)
	refused(t, err, codes.FailedPrecondition, "in the guest", "ext4", "damaged")
	if out := sh(t, m, "cat /proc/mounts"); strings.Contains(out, "/run/crust/volumes/") {
		t.Errorf("left mounted: %s", out)
	}
	// If the guest's kernel refuses an option, its message comes back.
	w := s.Volume("b", "ext4", "stripe=x")
	q := s.pod("pod2", w)
	ok(t, s.nodePublish(q))
	q.name = p.name
	refused(t, s.runtimePublish(q), codes.InvalidArgument, "stripe", "kernel says")
	// The guest still works.
	x := s.Volume("c", "xfs")
	r := s.pod("pod3", x)
	ok(t, s.nodePublish(r))
	r.name = p.name
	ok(t, s.runtimePublish(r))
	s.deregister(p)
	for _, pd := range []*pod{p, q, r} {
		s.nodeUnpublish(pd)
		s.Delete(pd.v)
	}
}

// C15 in a sandbox with its own kernel: the path that the guest returns shows the directory, and a
// path that leads out is refused.
func TestC15_SubPathsInAGuest(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	sh(t, m, "cd %s && mkdir -p sub/dir && echo deep > sub/dir/f && ln -s sub/dir inside && ln -s / outside && ln -s ../../../.. up",
		m.Path(p.target))
	resolve := func(source string) (*crustv1alpha1.ResolveMountResponse, error) {
		return s.Client.ResolveMount(ctxOf(t), &crustv1alpha1.ResolveMountRequest{SandboxId: p.name, Source: source})
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
	_, err := resolve(p.target + "/sub/dir/f/none")
	refused(t, err, codes.FailedPrecondition, "could not be made")
	made, err := resolve(p.target + "/inside/new/dir")
	ok(t, err)
	if out := sh(t, m, "echo new >%s/f; cd %s; chmod 0750 .; cat sub/dir/new/dir/f; stat -c %%a sub/dir/new", made.GetPath(), m.Path(p.target)); out !=
		"new\n755" {
		t.Errorf("a directory that was missing: %q", out)
	}
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
	s.Delete(v)
}

func TestR05_ReadOnlyInAGuest(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	v := s.Volume("a", "xfs")
	p := s.pod("pod", v)
	p.ro = true
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	before := run(t, "sha256sum", p.info.Source)
	ok(t, s.runtimePublish(p))
	if out, err := m.Exec("touch " + m.Path(p.target) + "/f"); err == nil || !strings.Contains(out, "Read-only file system") {
		t.Errorf("%v %s", err, out)
	}
	// Nor through the disk, which is itself read-only.
	if out, err := m.Exec("dd if=/dev/zero of=/dev/sda bs=4096 count=1"); err == nil {
		t.Errorf("the disk was written: %s", out)
	}
	s.deregister(p)
	if after := run(t, "sha256sum", p.info.Source); after != before {
		t.Error("the volume changed")
	}
	s.nodeUnpublish(p)
	s.Delete(v)
}

// withTree returns the guests' initramfs with dir/tree appended: the kernel unpacks both.
func withTree(t *testing.T, dir string) string {
	t.Helper()
	run(t, "sh", "-c", fmt.Sprintf("cd %s/tree && find . | cpio --quiet -o -H newc > ../more && cat %s/initramfs ../more > ../initramfs",
		dir, guestDir(t)))
	return dir + "/initramfs"
}

func TestS10_ALabelReachesTheGuest(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/tree/etc/selinux", 0o755))
	run(t, "checkpolicy", "-M", "-U", "allow", "-c", "33", "-o", dir+"/tree/etc/selinux/policy", "testdata/policy.conf")
	s.initrd = withTree(t, dir)
	const selinux = "security=selinux selinux=1 enforcing=0"
	first := &pod{name: "first"}
	m := s.boot(first, "q35", selinux)
	label := "system_u:object_r:svirt_image_t:s0:c1,c2"
	for deadline := time.Now().Add(patience(t)); ; time.Sleep(20 * time.Millisecond) {
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
		v := s.Volume(fs, fs, "context="+label)
		p := s.pod("pod-"+fs, v)
		p.asks.Label, p.asks.LabelOnMount = true, true
		ok(t, s.nodePublish(p))
		if !p.deferred || p.info.Options["context"] != label {
			t.Fatalf("%v %+v", p.deferred, p.info)
		}
		p.name = first.name
		ok(t, s.runtimePublish(p))
		at := m.Path(p.target)
		sh(t, m, "echo x > %s/f", at)
		if out := sh(t, m, "grep %s /proc/mounts", at); !strings.Contains(out, `context="`+label+`"`) &&
			!strings.Contains(out, "context="+label) {
			t.Errorf("%s in the guest: %s", fs, out)
		}
		_, err := s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
		ok(t, err)
		// A label missing in the guest's policy comes back as such an error.
		p.info.Options["context"] = "system_u:object_r:no_such_t:s0"
		refused(t, s.runtimePublish(p), codes.InvalidArgument, "label")
		s.nodeUnpublish(p)
		s.Delete(v)
	}
	s.deregister(first)
}

// A thousand calls over one port; none is lost.
func TestAThousandCallsToAGuest(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "", "--timeout", patience(t).String())
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	for i := range 500 {
		begin := time.Now()
		_, err := s.Client.ExecInSandbox(ctxOf(t), &crustv1alpha1.ExecInSandboxRequest{SandboxId: p.name})
		if status.Code(err) != codes.InvalidArgument {
			t.Fatalf("call %d: %v", i, err)
		}
		if _, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
			&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source}); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Logf("calls %d took %s", 2*i, took)
		}
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}

// The agent runs as a service beside the guest's other programs, over vsock. This machine has no
// hypervisor vsock for it, so the kernel's loopback stands in.
func TestTheAgentAsAServiceOverVsock(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	p := &pod{name: "vm"}
	m := s.boot(p, "q35", "")
	sh(t, m, "modprobe vsock_loopback")
	sh(t, m, "(/init -dir /tmp/service -listen vsock:1024 -vsock-peer 1 > /tmp/service.log 2>&1 &) ; (/init -dir /tmp/other -listen vsock:1025 > /tmp/other.log 2>&1 &)")
	if out := sh(t, m, "for i in $(seq 60); do /init -ask vsock:1:1024 && break; sleep 1; done"); !strings.Contains(out, "ext4") {
		t.Errorf("%s\n%s", out, sh(t, m, "cat /tmp/service.log"))
	}
	// By default only the host may connect.
	sh(t, m, "until grep -q serving /tmp/other.log; do sleep 1; done")
	if out, err := m.Exec("timeout 20 /init -ask vsock:1:1025"); err == nil {
		t.Errorf("a process of the guest was let in: %s", out)
	}
	s.deregister(p)
}
