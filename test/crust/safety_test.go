package crust

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// listed returns the ids of the sandboxes that crustd knows.
func (s *server) listed() string {
	s.T.Helper()
	list, err := s.Client.ListSandboxes(ctxOf(s.T), &crustv1alpha1.ListSandboxesRequest{})
	ok(s.T, err)
	var ids []string
	for _, sb := range list.GetSandboxes() {
		ids = append(ids, sb.GetSandboxId())
	}
	return strings.Join(ids, " ")
}

// crustctl runs crustctl against this server and its node.
func (s *server) crustctl(args ...string) (string, error) {
	out, err := exec.Command(testnode.BuildCommand(s.T, "crustctl", ""), append([]string{
		"--endpoint", s.Node.Endpoint(), "--kubelet-dir", s.Node.KubeletDir(), "sandbox",
		"--crust", "unix://" + s.Socket()}, args...)...).CombinedOutput()
	return string(out), err
}

// C08, C19: the node does not forget what a sandbox still has. An unpublish that comes too early,
// or names another sandbox, changes nothing.
func TestC08_C19_UnpublishWaitsForTheSandbox(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	sh(t, sb, "echo precious > %s/f", p.target)
	refused(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, p.target), codes.FailedPrecondition, v.ID, "still mounted by the sandbox",
		"crustctl sandbox unpublish")
	if out, err := s.crustctl("unpublish", "other", v.ID, p.target); err == nil ||
		!strings.Contains(out, `is in sandbox "pod", not in "other"`) {
		t.Errorf("%v %s", err, out)
	}
	if out, err := s.crustctl("expand", "other", v.ID, p.target, "1Gi"); err == nil || !strings.Contains(out, `not in "other"`) {
		t.Errorf("%v %s", err, out)
	}
	if _, err := os.Lstat(p.target); err != nil {
		t.Errorf("the target: %v", err)
	}
	if got := sh(t, sb, "cat %s/f", p.target); got != "precious" {
		t.Errorf("the sandbox sees %q", got)
	}
	if out, err := s.crustctl("stats", "pod", p.target); err != nil || !strings.Contains(out, "bytes") || !strings.Contains(out, "inodes") {
		t.Errorf("%v %s", err, out)
	}
	if out, err := s.crustctl("unpublish", "pod", v.ID, p.target); err != nil {
		t.Errorf("%v %s", err, out)
	}
	s.deregister(p)
	ok(t, s.Node.Client.Delete(ctxOf(t), v.ID))
}

// C08, C19: the record of a static volume is lost while a sandbox has the volume's device. The
// staged record names the device, and the kernel reports that it is in use.
func TestC08_C19_UnpublishWaitsForTheSandboxOfAVolumeThatIsUnknown(t *testing.T) {
	node := testnode.New(t, "", "--allow-device", "/dev/loop*")
	s := &server{Server: testcrust.NewServer(t, node, "namespace", testnode.BuildCommand(t, "crustd", ""))}
	img := filepath.Join(s.Node.Dir, "static.img")
	run(t, "truncate", "-s", "64M", img)
	run(t, "mkfs.ext4", "-q", img)
	dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", img))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	v := csiclient.Volume{ID: "static", FSType: "ext4", Context: map[string]string{"device": dev, "allowRuntimeAssistedMount": "true"}}
	ok(t, s.Node.Client.Stage(ctxOf(t), v))
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	sh(t, sb, "echo precious > %s/f", p.target)
	s.Node.Stop()
	run(t, "find", filepath.Join(s.Node.Dir, "state", "static"), "-name", "*.json", "-delete")
	s.Node.Start()
	refused(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, p.target), codes.FailedPrecondition, v.ID, "still mounted by the sandbox")
	if got := sh(t, sb, "cat %s/f", p.target); got != "precious" {
		t.Errorf("the sandbox sees %q", got)
	}
	s.deregister(p)
	s.nodeUnpublish(p)
}

// C18, C19: if a sandbox ends while crustd is down, it keeps its volume as long as one of its
// processes has it.
func TestC18_C19_ARestartAsksTheDevice(t *testing.T) {
	s := newServer(t, "namespace", "")
	v := s.Volume("a", "ext4")
	p, q := s.pod("pod", v), s.pod("other", v)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	container := exec.Command("nsenter", "--mount="+sb.Pin(), "unshare", "-m", "sleep", "3600")
	ok(t, container.Start())
	t.Cleanup(func() { _ = container.Process.Kill(); _ = container.Wait() })
	mine := fmt.Sprintf("/proc/%d/ns/mnt", container.Process.Pid)
	before, err := os.Readlink("/proc/self/ns/mnt")
	ok(t, err)
	eventually(t, testcrust.Longest(), "the container has its own mounts", func() bool {
		now, err := os.Readlink(mine)
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", container.Process.Pid))
		return err == nil && now != before && string(b) == "sleep\n"
	})
	s.Kill()
	sb.Kill()
	s.Start()
	q.info = p.info
	ok(t, os.MkdirAll(q.target, 0o750))
	s.namespace(q)
	refused(t, s.runtimePublish(q), codes.FailedPrecondition, "in use")
	refused(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, p.target), codes.FailedPrecondition, "still mounted")
	ok(t, container.Process.Kill())
	_ = container.Wait()
	eventually(t, testcrust.Longest(), "the sandbox is cleaned up", func() bool { return s.listed() == "other" })
	ok(t, s.runtimePublish(q))
	s.deregister(q)
	ok(t, os.Remove(q.target))
	s.nodeUnpublish(p)
	s.Delete(v)
}

// C18, C19: a container has a volume, and the name of its device is gone (udev takes links below /dev/disk away), or leads to another
// device. The number counts.
func TestC17_C18_C19_ADeviceThatHasAnotherName(t *testing.T) {
	for _, fs := range []string{"ext4", "btrfs"} { // one has the device's number, the other its name
		t.Run(fs, func(t *testing.T) { anotherName(t, fs) })
	}
}

func anotherName(t *testing.T, fs string) {
	link := filepath.Join(t.TempDir(), "disk")
	s := newServer(t, "namespace", "", "--allow-device", link)
	loop := func(name, megabytes string) string {
		img := filepath.Join(t.TempDir(), name)
		run(t, "truncate", "-s", megabytes+"M", img)
		run(t, "mkfs."+fs, "-q", img)
		dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", img))
		t.Cleanup(func() { run(t, "losetup", "-d", dev) })
		return dev
	}
	dev, other := loop("own", "256"), loop("other", "512")
	ok(t, os.Symlink(dev, link))
	p := s.pod("pod", csiclient.Volume{})
	p.info = crust.MountInfo{Source: link, Type: fs}
	ok(t, os.MkdirAll(p.target, 0o750))
	defer os.Remove(p.target)
	sb := s.namespace(p)
	ok(t, s.runtimePublish(p))
	container := exec.Command("nsenter", "--mount="+sb.Pin(), "unshare", "-m", "sh", "-c", "echo; exec sleep 3600")
	out, err := container.StdoutPipe()
	ok(t, err)
	ok(t, container.Start())
	t.Cleanup(func() { _ = container.Process.Kill(); _ = container.Wait() })
	_, err = out.Read(make([]byte, 1)) // it has its own mounts
	ok(t, err)
	unpublish := func() (err error) {
		for {
			_, err = s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: link})
			if status.Code(err) != codes.Aborted { // crustd tries by itself when a sandbox has ended
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	ok(t, os.Remove(link))
	refused(t, unpublish(), codes.FailedPrecondition, "still in use")
	ok(t, os.Symlink(other, link))
	_, err = s.Client.RuntimeExpandVolume(ctxOf(t), &crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: p.name, HostVolumeId: link})
	refused(t, err, codes.FailedPrecondition, "leads to the device")
	refused(t, unpublish(), codes.FailedPrecondition, "still in use")
	// Nor is it released when its sandbox has ended while crustd was away, and cannot be opened.
	s.Kill()
	sb.Kill()
	pins, err := filepath.Glob(filepath.Join(s.StateDir(), "ns/*"))
	ok(t, err)
	for _, pin := range append(pins, filepath.Join(s.StateDir(), "ns")) {
		testnode.Unmount(t, pin)
	}
	s.Start()
	refused(t, unpublish(), codes.FailedPrecondition, "still in use")
	// What uses the other device keeps nothing.
	dir := t.TempDir()
	run(t, "mount", other, dir)
	defer testnode.Unmount(t, dir)
	ok(t, container.Process.Kill())
	_ = container.Wait()
	eventually(t, testcrust.Longest(), "the sandbox is cleaned up", func() bool { return s.listed() == "" })
}

// C19: a device that is mounted elsewhere is not mounted again, and no target in a sandbox may lie
// inside another.
func TestC19_NoSecondMountOfADevice(t *testing.T) {
	s := newServer(t, "namespace", "")
	v, w := s.Volume("a", "ext4"), s.Volume("b", "ext4")
	p, below := s.pod("pod", v), s.pod("pod", w)
	ok(t, s.nodePublish(p))
	sb := s.namespace(p)
	dir := t.TempDir()
	run(t, "mount", p.info.Source, dir)
	err := s.runtimePublish(p)
	testnode.Unmount(t, dir)
	refused(t, err, codes.FailedPrecondition, p.info.Source, "in use outside of this sandbox", "the log says where")
	if strings.Contains(err.Error(), dir) || !strings.Contains(s.Log.String(), dir) {
		t.Errorf("where it is mounted is for the log, not for %v; the log: %s", err, s.Log.String())
	}
	if strings.Contains(err.Error(), "undone") {
		t.Errorf("nothing was begun: %v", err)
	}
	// The sandbox has nothing of it, so another one can have the volume.
	other := s.pod("other", v)
	other.info = p.info
	s.namespace(other)
	ok(t, os.MkdirAll(other.target, 0o750))
	ok(t, s.runtimePublish(other))
	s.deregister(other)
	ok(t, os.Remove(other.target))
	ok(t, s.runtimePublish(p))
	below.target = p.target + "/below"
	below.info = p.info
	second := s.pod("second", w)
	ok(t, s.nodePublish(second))
	below.info.Source = second.info.Source
	refused(t, s.runtimePublish(below), codes.FailedPrecondition, p.target)
	if out := sh(t, sb, "ls %s", p.target); strings.Contains(out, "below") {
		t.Errorf("a directory was made in the volume: %s", out)
	}
	s.deregister(p)
	s.nodeUnpublish(p)
	s.nodeUnpublish(second)
	s.Delete(v)
	s.Delete(w)
}

func TestOneServerForAStateDirectory(t *testing.T) {
	s := newServer(t, "namespace", "")
	second := func(backend string) string {
		c := exec.Command(testnode.BuildCommand(t, "crustd", ""), "--endpoint", "unix://"+filepath.Join(t.TempDir(), "s"),
			"--backend", backend, "--state-dir", s.StateDir(),
			"--kubelet-dir", s.Node.KubeletDir(), "--allow-device", "/dev/loop*")
		out, err := c.CombinedOutput()
		if err == nil {
			t.Error("it ran")
		}
		return string(out)
	}
	if out := second("namespace"); !strings.Contains(out, "crustd, process ") {
		t.Error(out)
	}
	p := &pod{name: "pod"}
	s.namespace(p)
	s.Kill()
	if out := second("qemu"); !strings.Contains(out, `has sandboxes of kind "namespace" (pod)`) || !strings.Contains(out, "--backend") {
		t.Error(out)
	}
	// As after a reboot: records of an earlier boot are removed.
	records, err := filepath.Glob(filepath.Join(s.StateDir(), "sandboxes", "*.json"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	ok(t, err)
	b, err := os.ReadFile(records[0])
	ok(t, err)
	ok(t, os.WriteFile(records[0], bytes.ReplaceAll(b, bytes.TrimSpace(boot), []byte("another")), 0o600))
	s.Start()
	if got := s.listed(); got != "" {
		t.Errorf("still there: %s", got)
	}
}

// C18: a microVM that does not answer when crustd starts does not delay the start. crustd tries
// again, and cleans up when the microVM ends.
func TestC18_ASandboxOutOfReachIsTriedAgain(t *testing.T) {
	t.Parallel()
	// A start that waits for the microVM's answer takes four times as long as a start may take.
	s := newServer(t, "qemu", "", "--timeout", (4 * patience(t)).String())
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	ok(t, s.runtimePublish(p))
	signal := func(n syscall.Signal) { t.Helper(); ok(t, syscall.Kill(m.vm.PID, n)) }
	s.Kill()
	signal(syscall.SIGSTOP)
	begin := time.Now()
	s.Start()
	if took := time.Since(begin); took > patience(t) {
		t.Errorf("the start took %s", took)
	}
	if got := s.listed(); got != "pod" {
		t.Errorf("known are %q", got)
	}
	_, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
		&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: "pod", HostVolumeId: p.info.Source})
	refused(t, err, codes.FailedPrecondition, "cannot be reached")
	signal(syscall.SIGCONT)
	eventually(t, patience(t), "it is reached again", func() bool {
		_, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
			&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: "pod", HostVolumeId: p.info.Source})
		return err == nil
	})
	s.Kill()
	signal(syscall.SIGSTOP)
	s.Start()
	m.Kill()
	eventually(t, patience(t), "it is cleaned up", func() bool { return s.listed() == "" })
	s.nodeUnpublish(p)
	s.Delete(v)
}

func TestC20_AUserWhoIsAllowed(t *testing.T) {
	s := newServer(t, "namespace", "", "--allow-uid", "65533", "--allow-device", "/dev/loop*")
	for dir := s.Node.Dir; len(dir) >= len(os.TempDir()); dir = filepath.Dir(dir) {
		ok(t, os.Chmod(dir, 0o755))
	}
	ctl := filepath.Join(s.Node.Dir, "crustctl")
	run(t, "cp", testnode.BuildCommand(t, "crustctl", ""), ctl)
	list := func(uid uint32) (string, error) {
		c := exec.Command(ctl, "sandbox", "--crust", "unix://"+s.Socket(), "list")
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := c.CombinedOutput()
		return string(out), err
	}
	if out, err := list(65533); err != nil {
		t.Errorf("%v %s", err, out)
	}
	if out, err := list(65534); err == nil {
		t.Errorf("another one was let in: %s", out)
	}
}
