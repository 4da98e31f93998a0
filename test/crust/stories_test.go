package crust

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func has(p *pod, c crust.Capability) bool {
	for _, have := range p.asks.Capabilities {
		if have == c {
			return true
		}
	}
	return false
}

// story1 is the whole life of a deferred volume (KEP-2857, story 1).
func story1(t *testing.T, s *server, boot func(*pod) sandboxed, fstype string) {
	v := s.Volume("story1-"+fstype, fstype)
	p := s.pod("pod1-"+fstype, v)
	group := uint32(4242)
	p.group, p.asks.Group, p.asks.SubPath = &group, true, true
	ok(t, s.nodePublish(p))
	if !p.deferred {
		t.Fatal("not deferred")
	}
	sb := boot(p)
	ok(t, s.runtimePublish(p))
	ok(t, s.runtimePublish(p)) // it may be repeated
	at := sb.Path(p.target)
	// C14: only the sandbox shows the volume.
	if lines := onHost(t, p.info.Source); lines != "" {
		t.Errorf("the host's mount table shows the volume:\n%s", lines)
	}
	if out := sh(t, sb, "cat /proc/self/mountinfo"); !strings.Contains(out, " "+at+" ") || !strings.Contains(out, " - "+fstype+" ") {
		t.Errorf("the sandbox's mount table:\n%s", out)
	}
	// C13: the group was applied in the sandbox.
	if out := sh(t, sb, "stat -c '%%g %%A' %s", at); out != "4242 drwxrwsr-x" && out != "4242 drwxrws---" {
		t.Errorf("the root: %s", out)
	}
	sum := strings.Fields(sh(t, sb, "dd if=/dev/urandom of=%[1]s/data bs=65536 count=64 2>/dev/null; sync; sha256sum < %[1]s/data", at))[0]
	if _, err := os.Lstat(p.target + "/data"); err == nil {
		t.Error("the host sees the file")
	}
	// C16: stats come from the sandbox's kernel.
	stats := func() (total, used int64) {
		req := &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: p.target}
		ok(t, crust.SetSupportsStats(req, has(p, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS)))
		r, err := s.Node.Client.NodeGetVolumeStats(ctxOf(t), req)
		ok(t, err)
		source, err := crust.StatsSource(r)
		ok(t, err)
		st, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
			&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: source})
		ok(t, err)
		if st.GetVolumeCondition().GetAbnormal() {
			t.Errorf("abnormal: %s", st.GetVolumeCondition().GetMessage())
		}
		return st.GetUsage()[0].GetTotal(), st.GetUsage()[0].GetUsed()
	}
	total, used := stats()
	if total < size/2 || total > size || used < 4<<20 {
		t.Errorf("%d bytes, %d used", total, used)
	}
	// C17, or story 6 if the runtime cannot grow.
	_, err := s.Node.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
	ok(t, err)
	grows := has(p, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE)
	req := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: p.target, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}}
	ok(t, crust.SetSupportsExpand(req, grows))
	e, err := s.Node.Client.NodeExpandVolume(ctxOf(t), req)
	if grows {
		ok(t, err)
		source, err := crust.ExpandSource(e)
		ok(t, err)
		// While a writer runs.
		sh(t, sb, "(while [ ! -e %[1]s/stop ]; do date >> %[1]s/log; done) >/dev/null 2>&1 &", at)
		r, err := s.Client.RuntimeExpandVolume(ctxOf(t),
			&crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: p.name, HostVolumeId: source, RequiredBytes: 2 * size})
		sh(t, sb, "touch %s/stop; sleep 0.2", at)
		ok(t, err)
		if r.GetCapacityBytes() != 2*size {
			t.Errorf("capacity %d", r.GetCapacityBytes())
		}
		if now, _ := stats(); now < total*3/2 {
			t.Errorf("%d bytes after the growth, %d before", now, total)
		}
	} else {
		refused(t, err, codes.FailedPrecondition, "cannot grow") // story 6
	}
	if got := strings.Fields(sh(t, sb, "sha256sum < %s/data", at))[0]; got != sum {
		t.Errorf("the data changed: %s, was %s", got, sum)
	}
	// The pod ends.
	s.deregister(p)
	s.nodeUnpublish(p)
	if lines := onHost(t, p.info.Source); lines != "" {
		t.Errorf("the host's mount table shows the volume:\n%s", lines)
	}
	// Back on the host the bytes are the same. This kernel mounts what a guest has had only if the
	// class allows it.
	back := s.Node.Target("back-" + fstype)
	ok(t, s.Node.Client.Unstage(ctxOf(t), v.ID))
	ok(t, s.Node.Client.Stage(ctxOf(t), v))
	if s.Backend == "qemu" {
		refused(t, s.Node.Client.Publish(ctxOf(t), v, back, false), codes.FailedPrecondition, v.ID, "given to a guest")
		ok(t, s.Node.Client.Unstage(ctxOf(t), v.ID))
		v.Context = map[string]string{"allowRuntimeAssistedMount": "true", "hostMayMount": "true"}
		ok(t, s.Node.Client.Stage(ctxOf(t), v))
	}
	ok(t, s.Node.Client.Publish(ctxOf(t), v, back, false))
	if out := run(t, "sha256sum", back+"/data"); !strings.HasPrefix(out, sum) {
		t.Errorf("on the host: %s, in the sandbox %s", out, sum)
	}
	ok(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, back))
	s.Delete(v)
}

// otherStories are the stories in which the host mounts the volume after all.
func otherStories(t *testing.T, s *server) {
	for name, c := range map[string]struct {
		change func(*pod)
		why    string
	}{
		"story 2: relabelling is not done":              {func(p *pod) { p.asks.Label = true }, "relabelling"},
		"story 3: the RuntimeClass has no socket":       {func(p *pod) { p.asks.Socket = "" }, "RuntimeClass"},
		"story 4: the StorageClass does not allow it":   {func(p *pod) { p.asks.Allowed = false }, "StorageClass"},
		"story 5: another file system is on the device": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			v := s.Volume(strings.Fields(name)[1], "ext4")
			p := s.pod("pod-"+strings.Trim(strings.Fields(name)[1], ":"), v)
			if c.why == "" {
				// The driver decides from what is on the device.
				ok(t, s.askNode(p, []string{"vfat"}))
			} else {
				c.change(p)
				if d := s.decide(p); d.Defer || !strings.Contains(d.Why, c.why) {
					t.Errorf("%+v", d)
				}
				ok(t, s.nodePublish(p))
			}
			if p.deferred {
				t.Error("deferred")
			}
			ok(t, os.WriteFile(p.target+"/f", []byte("mounted by the node"), 0o644))
			s.nodeUnpublish(p)
			s.Delete(v)
		})
	}
}

func TestC13_C14_C16_C17_Story1InANamespace(t *testing.T) {
	s := newServer(t, "namespace", "")
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			story1(t, s, func(p *pod) sandboxed { return s.namespace(p) }, fs)
		})
	}
}

func TestC04_C21_Stories2To5(t *testing.T) { otherStories(t, newServer(t, "namespace", "")) }

func TestC18_ASandboxThatDiesIsCleanedUp(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	events, err := s.Client.Watch(ctxOf(t), &crustv1alpha1.WatchRequest{})
	ok(t, err)
	_, err = events.Header()
	ok(t, err)
	sb.Kill()
	for {
		e, err := events.Recv()
		ok(t, err)
		if e.GetEvent() == crustv1alpha1.WatchResponse_SANDBOX_GONE {
			break
		}
	}
	s.nodeUnpublish(p)
	s.Delete(v) // refused while anything holds the device
}

func TestC19_OneDeviceInOneSandbox(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p := s.pod("one", v)
	ok(t, s.nodePublish(p))
	s.namespace(p)
	ok(t, s.runtimePublish(p))
	q := s.pod("two", v)
	q.info = p.info
	ok(t, os.MkdirAll(q.target, 0o750))
	s.namespace(q)
	refused(t, s.runtimePublish(q), codes.FailedPrecondition, p.info.Source, "one")
	q.info.Options = map[string]string{"ro": ""}
	refused(t, s.runtimePublish(q), codes.FailedPrecondition, p.info.Source)
	s.Restart()
	refused(t, s.runtimePublish(q), codes.FailedPrecondition, p.info.Source)
	_, err := s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: "one", HostVolumeId: p.info.Source})
	ok(t, err)
	ok(t, s.runtimePublish(q))
	s.deregister(p)
	s.deregister(q)
	ok(t, os.Remove(q.target))
	s.nodeUnpublish(p)
	s.Delete(v)
}

// C19, C21: two pods that only read one volume have it in two sandboxes at once.
func TestC19_C21_ReadersOfOneVolume(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "xfs") // one kernel mounts no second superblock of an xfs
	w := s.Node.Target("writer")
	ok(t, os.MkdirAll(filepath.Dir(w), 0o750))
	ok(t, s.Node.Client.Publish(ctxOf(t), v, w, false))
	ok(t, os.WriteFile(w+"/f", []byte("read by two\n"), 0o644))
	ok(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, w))
	var pods []*pod
	for _, name := range []string{"one", "two"} {
		p := s.pod(name, v)
		p.asks.Exclusive, p.asks.ReadOnly, p.ro = false, true, true
		pods = append(pods, p)
		ok(t, s.nodePublish(p))
		if !p.deferred {
			t.Fatalf("%s is not deferred", name)
		}
		sb := s.namespace(p)
		ok(t, s.runtimePublish(p))
		if out, err := sb.Exec("cat " + p.target + "/f; touch " + p.target + "/g"); err == nil || !strings.Contains(out, "read by two\n") ||
			!strings.Contains(out, "Read-only file system") {
			t.Errorf("%s: %v %s", name, err, out)
		}
	}
	// Each leaves by itself.
	s.deregister(pods[0])
	s.nodeUnpublish(pods[0])
	s.Restart()
	ok(t, s.runtimePublish(pods[1])) // it still has it
	s.deregister(pods[1])
	s.nodeUnpublish(pods[1])
	s.Delete(v)
}

func TestR05_S08_ReadOnlyAndLabelsReachTheSandbox(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	p.ro = true
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	if out, err := sb.Exec("touch " + p.target + "/f"); err == nil || !strings.Contains(out, "Read-only file system") {
		t.Errorf("%v %s", err, out)
	}
	// Read-only is applied recursively to what was mounted below, not to later mounts. A bare
	// device has nothing below it, so only its flag is checked.
	if out := sh(t, sb, "findmnt -no OPTIONS %s", p.target); !strings.HasPrefix(out, "ro") {
		t.Errorf("options %s", out)
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}

func TestU04_TheSandboxesUserNamespaceMapsTheVolume(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	group := uint32(3000)
	p.group = &group
	ok(t, s.nodePublish(p))
	holder := exec.Command("sleep", "3600")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	ok(t, holder.Start())
	defer func() { _ = holder.Process.Kill(); _ = holder.Wait() }()
	userns := fmt.Sprintf("/proc/%d/ns/user", holder.Process.Pid)
	_, err := s.Client.RegisterSandbox(ctxOf(t), &crustv1alpha1.RegisterSandboxRequest{
		SandboxId: p.name,
		Kind:      &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{UserNamespace: userns}},
	})
	ok(t, err)
	sb := &testcrust.Holder{T: t, S: s.Server, ID: p.name, Cmd: holder}
	ok(t, s.runtimePublish(p))
	// On the host, the container's root and its group own the volume.
	if out := sh(t, sb, "stat -c '%%u:%%g' %s", p.target); out != "100000:103000" {
		t.Errorf("owner %s", out)
	}
	sh(t, sb, "cd %s && nsenter --user=%s --setuid 0 --setgid 0 touch f && nsenter --user=%s stat -c '%%u:%%g' f", p.target, userns, userns)
	if out := sh(t, sb, "stat -c '%%u:%%g' %s/f", p.target); out != "100000:103000" {
		t.Errorf("a file of the container's root: %s", out)
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}
