package crust

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// podRuntime is crust-oci with microVMs, called as containerd's shim calls it.
type podRuntime struct {
	s    *server
	dir  string
	bin  string
	pods string
}

func newPodRuntime(t testing.TB, s *server) *podRuntime {
	t.Helper()
	// A shim waits for the processes that its runtime leaves.
	ok(t, linux.AdoptOrphans())
	r := &podRuntime{s: s, dir: t.TempDir()}
	r.bin = filepath.Join(r.dir, "crust-vm") // as crustd installs it
	ok(t, os.Symlink(testnode.BuildCommand(t, "crust-oci", ""), r.bin))
	r.pods = filepath.Join(r.dir, "pods")
	guest, err := filepath.Abs("../../.cache/guest")
	ok(t, err)
	if _, err := os.Stat(guest + "/pod-initramfs"); err != nil {
		t.Fatalf("%v; `make pod-guest` builds it", err)
	}
	b, err := json.Marshal(map[string]any{
		"runtime": "runc",
		"microvm": map[string]any{"endpoint": "unix://" + s.Socket(), "kernel": guest + "/vmlinuz", "initrd": guest + "/pod-initramfs",
			"dir": r.pods, "memory": 384},
	})
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(r.dir, "oci.json"), b, 0o600))
	return r
}

// call runs crust-oci. Streams are files: a pipe would be kept open by the container.
func (r *podRuntime) call(stdin, stdout, stderr *os.File, args ...string) error {
	c := r.command(context.Background(), args...)
	c.Stdin, c.Stdout, c.Stderr = stdin, stdout, stderr
	if err := c.Run(); err != nil {
		said, _ := os.ReadFile(filepath.Join(r.dir, "log"))
		lines := strings.Split(strings.TrimSpace(string(said)), "\n")
		return fmt.Errorf("%s: %w: %s", args[0], err, strings.Join(lines[max(0, len(lines)-3):], "\n"))
	}
	return nil
}

// spec is a container's config.json, as containerd makes it.
type spec map[string]any

func (r *podRuntime) spec(t testing.TB, pod, kind string, args ...string) spec {
	return spec{
		"ociVersion": "1.2.0", "hostname": pod,
		"process": map[string]any{
			"user": map[string]any{"uid": 0, "gid": 0}, "args": args, "cwd": "/", "noNewPrivileges": true, "env": []string{"PATH=/bin"},
			"oomScoreAdj": 7,
			"capabilities": map[string]any{"bounding": []string{"CAP_CHOWN"}, "effective": []string{"CAP_CHOWN"},
				"permitted": []string{"CAP_CHOWN"}},
		},
		"root":        map[string]any{"path": "rootfs"},
		"annotations": map[string]any{"io.kubernetes.cri.sandbox-id": pod, "io.kubernetes.cri.container-type": kind},
		"mounts": []any{
			mount("/proc", "proc", "proc"), mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
			mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
		},
		"linux": map[string]any{"cgroupsPath": testCgroup(pod) + "/" + kind, "namespaces": []any{
			map[string]any{"type": "mount"}, map[string]any{"type": "pid"}, map[string]any{"type": "ipc"}, map[string]any{"type": "uts"},
			map[string]any{"type": "network"}}},
	}
}

// testCgroup is a pod's cgroup. The same test may run twice at a time, as for two mutants.
func testCgroup(pod string) string { return fmt.Sprintf("/crust-test-%d-%s", os.Getpid(), pod) }

func mount(dest, kind, src string, options ...string) map[string]any {
	return map[string]any{"destination": dest, "type": kind, "source": src, "options": options}
}

func (s spec) add(mounts ...any) spec { s["mounts"] = append(s["mounts"].([]any), mounts...); return s }

// bundle writes a container's directory, with busybox as its root file system.
func (s spec) bundle(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	rootfs := filepath.Join(dir, "rootfs")
	for _, d := range []string{"proc", "dev", "data", "conf", "sys", "bin", "tmp"} {
		ok(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	path, err := exec.LookPath("busybox")
	ok(t, err)
	run(t, "cp", path, rootfs+"/bin/busybox")
	run(t, "ln", "-s", "busybox", rootfs+"/bin/sh")
	if s["linux"].(map[string]any)["uidMappings"] != nil { // containerd gives the image to the pod's users, and lets them come there
		run(t, "chown", "-R", fmt.Sprintf("%d:%d", firstID, firstID), rootfs)
		for above := filepath.Dir(dir); len(above) >= len(os.TempDir()); above = filepath.Dir(above) {
			ok(t, os.Chmod(above, 0o711))
		}
	}
	b, err := json.Marshal(s)
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644))
	return dir
}

// container is a container that was started.
type container struct {
	r       *podRuntime
	id      string
	bundle  string // directory
	process *os.Process
	out     *os.File // standard output and error
}

func (c *container) text(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(c.out.Name())
	ok(t, err)
	return string(b)
}

// wait returns the container's exit status.
func (c *container) wait(t testing.TB) int {
	t.Helper()
	type end struct {
		s   *os.ProcessState
		err error
	}
	ended := make(chan end, 1)
	go func() { s, err := c.process.Wait(); ended <- end{s, err} }()
	select {
	case e := <-ended:
		ok(t, e.err)
		return linux.ExitStatus(e.s)
	case <-time.After(testcrust.Longest()):
		t.Fatalf("container %s does not end: %s", c.id, c.text(t))
		return 0
	}
}

// start creates and starts a container.
func (r *podRuntime) start(t testing.TB, id string, s spec) (*container, error) {
	t.Helper()
	return r.startWith(t, id, s, nil)
}

// startWith is start with a standard input.
func (r *podRuntime) startWith(t testing.TB, id string, s spec, in *os.File) (*container, error) {
	t.Helper()
	return r.startWithin(t, id, s, in, testcrust.Longest())
}

// startWithin is startWith, and tries again for so long if the guest has no answer in time.
func (r *podRuntime) startWithin(t testing.TB, id string, s spec, in *os.File, most time.Duration) (*container, error) {
	t.Helper()
	out, err := os.CreateTemp(r.dir, "out-")
	ok(t, err)
	pidFile := filepath.Join(r.dir, id+".pid")
	begin, bundle := time.Now(), ""
	for {
		bundle = s.bundle(t)
		err := r.call(in, out, out, "create", "--bundle", bundle, "--pid-file", pidFile, id)
		if err == nil {
			break
		}
		if !slow(err) || time.Since(begin) > most {
			return nil, err
		}
		// The kubelet tries again, too, for as long as the pod is there.
		t.Logf("container %s is not made yet: %v", id, err)
		ok(t, r.call(nil, nil, nil, "delete", "--force", id))
		ok(t, out.Truncate(0)) // crust-oci's own words
		_, err = out.Seek(0, io.SeekStart)
		ok(t, err)
	}
	c := &container{r: r, id: id, bundle: bundle, out: out, process: processIn(t, pidFile)}
	err = r.call(nil, nil, nil, "start", id)
	if err != nil {
		t.Logf("container %s wrote:\n%s", id, c.text(t))
	}
	return c, err
}

// slow says whether a call ended because the guest had no answer in the time that containerd gives it.
func slow(err error) bool { return strings.Contains(err.Error(), "no answer within") }

func processIn(t testing.TB, pidFile string) *os.Process {
	t.Helper()
	b, err := os.ReadFile(pidFile)
	ok(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	ok(t, err)
	p, err := os.FindProcess(pid)
	ok(t, err)
	return p
}

// pod starts a pod's own container, and with it the microVM. At the end of the test nothing of it is left. network is the path of its
// network namespace, "" for an empty one.
func (r *podRuntime) pod(t testing.TB, id, network string) *container {
	t.Helper()
	return r.podOf(t, id, network, r.spec(t, id, "sandbox", "/bin/busybox", "sleep", "100000"))
}

func (r *podRuntime) podOf(t testing.TB, id, network string, config spec) *container {
	t.Helper()
	for _, n := range config["linux"].(map[string]any)["namespaces"].([]any) {
		if n := n.(map[string]any); n["type"] == "network" && network != "" {
			n["path"] = network
		}
	}
	c, err := r.start(t, id, config)
	ok(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"monitor.log", "console.log"} {
				b, _ := os.ReadFile(filepath.Join(r.pods, id, name))
				t.Logf("%s of %s:\n%s", name, id, b)
			}
		}
		r.end(t, c)
		if left, err := os.ReadDir(filepath.Join(r.pods, id)); !os.IsNotExist(err) {
			t.Errorf("left behind: %v", left)
		}
		removeCgroups(t, id)
	})
	return c
}

// removeCgroups removes the cgroups of a pod that has ended.
func removeCgroups(t testing.TB, pod string) {
	run(t, "sh", "-c", "find /sys/fs/cgroup -depth -type d -path '*"+testCgroup(pod)+"*' -exec rmdir {} + 2>/dev/null; true")
}

// end ends a pod as containerd does: it kills the pod's own container, waits for its end, and deletes it.
func (r *podRuntime) end(t testing.TB, c *container) {
	t.Helper()
	if c.process.Kill() == nil { // or it has ended
		c.wait(t)
	}
	ok(t, r.call(nil, nil, nil, "delete", "--force", c.id))
}

func (r *podRuntime) delete(t testing.TB, id string) {
	t.Helper()
	ok(t, r.call(nil, nil, nil, "delete", "--force", id))
}

// A pod's containers run in a guest, with their files, streams and exit statuses, and have the volume that the guest mounted.
func TestC12_C15_APodsContainersInAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	v := s.Volume("v", "ext4")
	p := s.pod("pod-a", v)
	ok(t, s.nodePublish(p))
	pause := r.pod(t, p.name, "")
	ok(t, s.runtimePublish(p))
	if got := r.qemuScore(t, p.name); got != "1000" {
		t.Errorf("the host's kernel spares a microVM without containers: %s", got)
	}
	conf := t.TempDir()
	ok(t, os.WriteFile(filepath.Join(conf, "f"), []byte("from the host\n"), 0o644))
	script := `uname -r; hostname; echo kept > /data/f; cat /conf/f; echo x 2>/dev/null > /conf/g || echo refused; grep ' /data ' /proc/mounts
		cat /proc/self/oom_score_adj; echo to stderr >&2; exit 7`
	one, err := r.start(t, "one", r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c", script).
		add(mount("/data", "bind", p.target, "rbind"), mount("/conf", "bind", conf, "rbind", "ro")))
	ok(t, err)
	if status := one.wait(t); status != 7 {
		t.Errorf("it ended with %d", status)
	}
	wrote := one.text(t)
	for _, want := range []string{p.name + "\n", "from the host\n", "refused\n", " /data ext4 ", "\n7\n", "to stderr\n"} {
		if !strings.Contains(wrote, want) {
			t.Errorf("%q is missing in what it wrote:\n%s", want, wrote)
		}
	}
	if strings.HasPrefix(wrote, linux.Uname()+"\n") {
		t.Errorf("it runs on the host's kernel: %s", wrote)
	}
	if table := onHost(t, p.info.Source); table != "" {
		t.Errorf("the host mounts it: %s", table)
	}
	r.delete(t, "one")
	ok(t, os.RemoveAll(conf))

	if got := r.qemuScore(t, p.name); got != "7" {
		t.Errorf("the host's kernel does not spare a microVM as it spares its container: %s", got)
	}

	// A second container, later, with the same volume: signals, and a process beside its first one. It does not read its input.
	input, err := os.Create(filepath.Join(r.dir, "input"))
	ok(t, err)
	ok(t, input.Truncate(8<<20))
	const two = "2222222222222222222222222222222222222222222222222222222222222222" // as long as containerd's
	second, err := r.startWith(t, two, r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c",
		`trap 'echo ended; exit 3' TERM; trap 'echo window' WINCH; cat /data/f; while :; do busybox sleep 0.1 </dev/null; done`).
		add(mount("/data", "bind", p.target, "rbind")), input)
	ok(t, err)
	eventually(t, testcrust.Longest(), "it reads the volume", func() bool { return strings.Contains(second.text(t), "kept") })
	out, status := r.exec(t, two, "/bin/busybox", "sh", "-c", "read line; echo got $line; cat /data/f; exit 5")
	if status != 5 || out != "got input\nkept\n" {
		t.Errorf("exec: %d %q", status, out)
	}
	if size := r.terminal(t, two); size != "30 100" {
		t.Errorf("a terminal's size: %q", size)
	}
	if out, status := r.exec(t, two, "/not/there"); status == 0 || !strings.Contains(out, "/not/there") {
		t.Errorf("a program that is not there: %d %q", status, out)
	}
	r.keepsItsProgram(t, p.name, two)
	ok(t, r.call(nil, nil, nil, "kill", two, "28"))
	eventually(t, testcrust.Longest(), "SIGWINCH comes", func() bool { return strings.Contains(second.text(t), "window") })
	ok(t, r.call(nil, nil, nil, "kill", two, "15"))
	if status := second.wait(t); status != 3 || !strings.Contains(second.text(t), "ended") {
		t.Errorf("SIGTERM: %d %s", status, second.text(t))
	}
	r.delete(t, two)
	_, err = r.start(t, "three", r.spec(t, p.name, "container", "/not/there"))
	if err == nil || !strings.Contains(err.Error(), "/not/there") {
		t.Errorf("a program that is not there: %v", err)
	}

	// What kills a container's stub kills the container, and only that.
	four, err := r.start(t, "four", r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c",
		"echo up; while :; do date +%s > /data/alive; busybox sleep 0.1; done").add(mount("/data", "bind", p.target, "rbind")))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it runs", func() bool { return strings.Contains(four.text(t), "up") })
	ok(t, r.call(nil, nil, nil, "kill", "four", "9"))
	if status := four.wait(t); status != 137 {
		t.Errorf("SIGKILL: %d", status)
	}
	r.delete(t, "four")

	// A pod ends while a container runs. What that wrote last, and did not sync, is on the device.
	five, err := r.start(t, "five", r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c",
		"echo last > /data/last; echo up; busybox sleep 100000").add(mount("/data", "bind", p.target, "rbind")))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it runs", func() bool { return strings.Contains(five.text(t), "up") })
	r.end(t, pause)
	if status := five.wait(t); status != 137 {
		t.Errorf("the pod's end: %d", status)
	}
	s.lastOnTheHost(t, p, v)
	// Its pod has gone, so only the host's runtime knows it.
	r.delete(t, "five")
}

// lastOnTheHost takes a volume back from a pod, and looks on the host for what its container wrote last.
func (s *server) lastOnTheHost(t testing.TB, p *pod, v csiclient.Volume) {
	t.Helper()
	s.nodeUnpublish(p)
	v.Context = maps.Clone(v.Context)
	v.Context["hostMayMount"] = "true" // a guest had it, which the host distrusts
	q := s.pod("on-the-host", v)
	ok(t, s.askNode(q, nil))
	last := filepath.Join(q.target, "last")
	if b, err := os.ReadFile(last); err != nil || string(b) != "last\n" {
		t.Errorf("on the host: %q %v", b, err)
	}
	if got := run(t, "stat", "-c", "%u:%g", last); got != "0:0\n" {
		t.Errorf("the container's root made a file of %s", got)
	}
	s.nodeUnpublish(q)
	s.Delete(v)
}

// qemuScore is how willingly the host's kernel kills a pod's QEMU.
func (r *podRuntime) qemuScore(t testing.TB, pod string) string {
	t.Helper()
	var vm struct{ QEMU int }
	readJSON(t, filepath.Join(r.pods, pod, "guest.json"), &vm)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", vm.QEMU))
	ok(t, err)
	return strings.TrimSpace(string(b))
}
