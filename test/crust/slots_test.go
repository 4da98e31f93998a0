package crust

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A container of a pod in a microVM runs before its volume is known.
func TestC24_AVolumeForARunningContainerInAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	v := s.Volume("v", "xfs")
	p := s.pod("warm", v)
	pause := r.pod(t, p.name, "")
	begin := func(id string, args ...string) *container {
		c, err := r.start(t, id, r.spec(t, p.name, "container", append([]string{"/bin/busybox"}, args...)...).
			add(mount("/data", "bind", crust.SlotsDir+"/data", "rbind", "rprivate", "rw")))
		ok(t, err)
		return c
	}
	c := begin("one", "sleep", "100000")
	s.lateVolume(p, late{
		in: func(script string) (string, int) { return r.exec(t, c.id, "/bin/busybox", "sh", "-c", script) },
		start: func(id, script string) (said func() string, end func()) {
			c := begin(id, "sh", "-c", script)
			return func() string { return c.text(t) }, func() {
				ok(t, r.call(nil, nil, nil, "kill", id, "9"))
				c.wait(t)
				r.delete(t, id)
			}
		},
	})
	r.end(t, pause)
	c.wait(t)
	s.lastOnTheHost(t, p, v)
	r.delete(t, c.id)
}

// A container of a sandbox that is a mount namespace runs before its volume is known.
func TestC24_AVolumeForARunningContainerInANamespace(t *testing.T) {
	wrapper := testnode.BuildCommand(t, "crust-oci", "")
	for name, runtime := range runtimes(t) {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, "namespace", "")
			v := s.Volume("v", "ext4")
			p := s.pod("warm", v)
			// crun refuses the hybrid cgroups of some machines, so it gets the unified hierarchy.
			const unified = `[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || [ "$0" != crun ] || mount -t cgroup2 none /sys/fs/cgroup`
			command := func(program string, args ...string) *exec.Cmd {
				args = append(append([]string{program}, runtime[1:]...), args...)
				begin := []string{"-m", "--propagation", "slave", "sh", "-c", unified + `; exec "$@"`, name}
				c := exec.Command("unshare", append(begin, args...)...)
				c.Env = append(os.Environ(), "CRUST_OCI_RUNTIME="+runtime[0], "CRUST_ENDPOINT=unix://"+s.Socket())
				return c
			}
			source := crust.SlotsDir + "/data"
			if out, err := command(wrapper, "run", "--bundle", bundle(t, p.name, source, "true"), "none").CombinedOutput(); err == nil ||
				!strings.Contains(string(out), "is a slot") {
				t.Errorf("without a sandbox: %v %s", err, out)
			}
			sb := s.namespace(p)
			if name == "crun" {
				sh(t, sb, `[ "$(stat -f -c %%T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup`)
			}
			call := func(args ...string) (string, int) {
				c := command(runtime[0], args...)
				b, err := c.CombinedOutput()
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) {
					t.Fatal(err)
				}
				return string(b), c.ProcessState.ExitCode()
			}
			begin := func(id, script string) (said func() string, end func()) {
				out, err := os.CreateTemp(t.TempDir(), "out")
				ok(t, err)
				c := command(wrapper, "run", "--bundle", bundle(t, p.name, source, script, "rw"), id)
				c.Stdout, c.Stderr = out, out
				ok(t, c.Start())
				said = func() string { b, err := os.ReadFile(out.Name()); ok(t, err); return string(b) }
				end = sync.OnceFunc(func() {
					call("delete", "--force", id)
					_ = c.Wait() // it was killed
					out.Close()
				})
				t.Cleanup(end)
				return said, end
			}
			said, end := begin("one", "echo begun; busybox sleep 100000")
			eventually(t, testcrust.Longest(), "the container runs", func() bool { return strings.Contains(said(), "begun") })
			s.lateVolume(p, late{
				in:    func(script string) (string, int) { return call("exec", "one", "/bin/busybox", "sh", "-c", script) },
				start: begin,
			})
			end()
			s.deregister(p)
			s.nodeUnpublish(p)
			s.Delete(v)
		})
	}
}

// late is what runs in the containers of a sandbox.
type late struct {
	// in runs a script in a container that has the slot data at /data.
	in func(script string) (out string, status int)
	// start starts another such container, whose mount has the option rw.
	start func(id, script string) (said func() string, end func())
}

// lateVolume gives a volume to a container that runs, takes it away, and gives it again.
func (s *server) lateVolume(p *pod, c late) {
	t := s.T
	t.Helper()
	sees := func(what, script, want string) {
		t.Helper()
		if out, status := c.in(script); strings.TrimSpace(out) != want || status != 0 {
			t.Errorf("%s: the container of %s says %q, status %d; want %q", what, p.name, out, status, want)
		}
	}
	bind := func(sub string, readOnly bool) error {
		_, err := s.Client.BindVolume(ctxOf(t), &crustv1alpha1.BindVolumeRequest{
			SandboxId: p.name, Slot: "data", HostVolumeId: p.info.Source, SubPath: sub, ReadOnly: readOnly})
		return err
	}
	unbind := func() error {
		_, err := s.Client.UnbindVolume(ctxOf(t), &crustv1alpha1.UnbindVolumeRequest{SandboxId: p.name, Slot: "data"})
		return err
	}
	unpublish := func() error {
		_, err := s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
		return err
	}
	const write = "echo x 2>/dev/null >/data/volume/x || echo refused"
	const empty = "ls -A /data /data/volume; chmod 700 /data 2>/dev/null && echo changed; echo x 2>/dev/null >/data/x || echo refused; " + write
	const isEmpty = "/data:\nvolume\n\n/data/volume:\nrefused\nrefused"
	sees("before", empty, isEmpty)
	ok(t, s.nodePublish(p))
	refused(t, bind("", false), codes.NotFound, "not published")
	ok(t, s.runtimePublish(p))
	for range 2 {
		ok(t, bind("", false))
	}
	sees("bound", "cd /data/volume && mkdir sub && echo deep >sub/f && echo kept >f && cat f", "kept")
	if table := onHost(t, p.info.Source); table != "" {
		t.Errorf("the host mounts it: %s", table)
	}
	// Another directory than it shows, and the same with other access.
	refused(t, bind("sub", false), codes.AlreadyExists, "unbind it first")
	refused(t, bind("", true), codes.AlreadyExists, "unbind it first")

	// A container that starts now, and uses it.
	said, end := c.start("two", "cd /data/volume && cat f; busybox sleep 100000")
	eventually(t, testcrust.Longest(), "the second container reads it", func() bool { return strings.Contains(said(), "kept") })
	refused(t, unbind(), codes.FailedPrecondition, "in use")
	refused(t, unpublish(), codes.FailedPrecondition, "in use")
	sees("in use", "cat /data/volume/f", "kept")
	end()
	eventually(t, testcrust.Longest(), "it can be taken away", func() bool { return unbind() == nil })
	ok(t, unbind())
	sees("taken away", empty, isEmpty)

	// A path that leads out, and a file.
	refused(t, bind("../..", false), codes.InvalidArgument, "leads out")
	refused(t, bind("f", false), codes.InvalidArgument, "directory")
	ok(t, bind("sub", true))
	sees("a directory, read-only", "cat /data/volume/f; "+write, "deep\nrefused")
	said, end = c.start("three", "cat /data/volume/f; "+write+"; busybox sleep 100000")
	eventually(t, testcrust.Longest(), "a container with rw reads it", func() bool { return strings.Contains(said(), "deep\nrefused") })
	end()
	s.Kill()
	s.Start()
	ok(t, bind("sub", true))
	refused(t, bind("", true), codes.AlreadyExists, "unbind it first")
	eventually(t, testcrust.Longest(), "it leaves", func() bool { return unpublish() == nil })
	sees("unpublished", empty, isEmpty)
	ok(t, s.runtimePublish(p))
	crustctl := func(args ...string) {
		t.Helper()
		if out, err := s.crustctl(args...); err != nil {
			t.Errorf("%v: %v %s", args, err, out)
		}
	}
	crustctl("bind", p.name, "data", p.target, "--sub-path", "sub", "--read-only")
	sees("bound by crustctl", "cat /data/volume/f; "+write, "deep\nrefused")
	crustctl("unbind", p.name, "data")
	sees("taken away by crustctl", empty, isEmpty)
	ok(t, bind("", false))
	sees("again", "cat /data/volume/f && echo last >/data/volume/last", "kept")
}
