package crust

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// runtimes returns real OCI runtimes: the runc that test/runtimes pins, and Debian's crun.
func runtimes(t *testing.T) map[string][]string {
	t.Helper()
	dir := t.TempDir()
	runc := testnode.Program{Name: "runc", Dir: "../runtimes", Package: "github.com/opencontainers/runc", Cgo: true}.Build(t)
	return map[string][]string{
		"runc": {runc, "--root", filepath.Join(dir, "runc-state")},
		"crun": {"crun", "--root", filepath.Join(dir, "crun-state"), "--cgroup-manager=disabled"},
	}
}

// bundle is a container of the sandbox with one mount at /data.
func bundle(t *testing.T, sandbox, source string, script string, options ...string) string {
	t.Helper()
	dir := t.TempDir()
	rootfs := filepath.Join(dir, "rootfs")
	for _, d := range []string{"proc", "dev", "data", "sys", "bin"} {
		ok(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	run(t, "cp", busybox(t), rootfs+"/bin/busybox")
	mount := func(dest, kind, src string, options ...string) map[string]any {
		return map[string]any{"destination": dest, "type": kind, "source": src, "options": options}
	}
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"user": map[string]any{"uid": 0, "gid": 0}, "args": []string{"/bin/busybox", "sh", "-c", script}, "cwd": "/",
			"noNewPrivileges": true,
			"env":             []string{"PATH=/bin"},
		},
		"root":        map[string]any{"path": "rootfs", "readonly": true},
		"annotations": map[string]any{"io.kubernetes.cri.sandbox-id": sandbox, "io.kubernetes.cri.container-type": "container"},
		"mounts": []any{
			mount("/proc", "proc", "proc"), mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
			mount("/data", "bind", source, append(options, "rbind")...),
		},
		"linux": map[string]any{"namespaces": []any{map[string]any{"type": "mount"}, map[string]any{"type": "pid"},
			map[string]any{"type": "ipc"}, map[string]any{"type": "uts"}}},
	}
	b, err := json.Marshal(spec)
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644))
	return dir
}

func busybox(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("busybox is not installed (scripts/setup.sh does that)")
	}
	return path
}

func TestC15_C24_ContainersSeeTheSandboxesVolumes(t *testing.T) {
	wrapper := testnode.BuildCommand(t, "crust-oci", "")
	for name, runtime := range runtimes(t) {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, "namespace", "")
			v := s.Volume("v", "ext4")
			p := s.pod("pod", v)
			ok(t, s.nodePublish(p))
			// start runs a container, directly or through crust-oci. crun refuses the hybrid
			// cgroups of some machines, so it gets the unified hierarchy.
			count := 0
			start := func(through bool, source, script string) (string, error) {
				t.Helper()
				count++
				id := fmt.Sprintf("crust-%s-%d-%d", name, os.Getpid(), count)
				argv := append([]string{}, runtime...)
				if through {
					argv[0] = wrapper
				}
				argv = append(argv, "run", "--bundle", bundle(t, p.name, source, script), id)
				c := exec.Command("unshare", append([]string{"-m", "--propagation", "slave", "sh", "-c",
					`[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || [ "$0" != crun ] || mount -t cgroup2 none /sys/fs/cgroup; exec "$@"`, name}, argv...)...)
				c.Env = append(os.Environ(), "CRUST_OCI_RUNTIME="+runtime[0], "CRUST_ENDPOINT=unix://"+s.Socket())
				out, err := c.CombinedOutput()
				if err != nil {
					_ = exec.Command(runtime[0], append(append([]string{}, runtime[1:]...), "delete", "--force", id)...).Run()
				}
				return string(out), err
			}
			write := "echo from a container > /data/f && cat /data/f"
			// C24: a runtime that does not know CRUST starts the container on a closed directory.
			// Nothing can be read, written or changed there, whatever capabilities the container's
			// root has.
			out, err := start(false, p.target,
				"echo begun; ls -A /data | grep . && echo FOUND; echo x > /data/f && echo WROTE; mkdir /data/d && echo MADE; chmod 777 /data && echo OPENED; true")
			if err != nil || !strings.Contains(out, "begun") {
				t.Errorf("a plain %s did not start it: %v %s", name, err, out)
			}
			for _, did := range []string{"FOUND", "WROTE", "MADE", "OPENED"} {
				if strings.Contains(out, did) {
					t.Errorf("a plain %s: the container %s the closed directory: %s", name, did, out)
				}
			}
			if out, err := start(false, p.target, write); err == nil {
				t.Errorf("a plain %s wrote: %s", name, out)
			}
			// crust-oci refuses while the sandbox does not have the volume.
			out, err = start(true, p.target, write)
			if err == nil || !strings.Contains(out, "deferred") {
				t.Errorf("%v %s", err, out)
			}
			sb := s.namespace(p)
			out, err = start(true, p.target, write)
			if err == nil || !strings.Contains(out, "was not published to sandbox") {
				t.Errorf("%v %s", err, out)
			}
			ok(t, s.runtimePublish(p))
			if name == "crun" {
				sh(t, sb, `[ "$(stat -f -c %%T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup`)
			}
			if out, err := start(true, p.target, write); err != nil || !strings.Contains(out, "from a container") {
				t.Errorf("%v %s", err, out)
			}
			if out := sh(t, sb, "cat %s/f", p.target); out != "from a container" {
				t.Errorf("in the sandbox: %s", out)
			}
			if _, err := os.Lstat(p.target + "/f"); err == nil {
				t.Error("the host sees the file")
			}
			// Sub-paths are resolved in the volume.
			sh(t, sb, "cd %s && mkdir -p sub/dir && echo deep > sub/dir/f && ln -s sub/dir inside && ln -s / outside && ln -s ../../../../../../../.. up", p.target)
			for _, sub := range []string{"sub/dir", "inside"} {
				if out, err := start(true, p.target+"/"+sub, "cat /data/f"); err != nil || !strings.Contains(out, "deep") {
					t.Errorf("subPath %s: %v %s", sub, err, out)
				}
			}
			for _, sub := range []string{"outside", "outside/etc", "up", "up/etc"} {
				if out, err := start(true, p.target+"/"+sub, "ls /data"); err == nil || !strings.Contains(out, "leads out of the volume") {
					t.Errorf("subPath %s: %v %s", sub, err, out)
				}
			}
			if out, err := start(true, p.target+"/sub/dir/f/none", "ls /data"); err == nil || !strings.Contains(out, "could not be made") {
				t.Errorf("subPath below a file: %v %s", err, out)
			}
			out, err = start(true, p.target+"/sub/new/dir", "echo made >/data/f")
			if err != nil || sh(t, sb, "cat %s/sub/new/dir/f", p.target) != "made" {
				t.Errorf("subPath that is new: %v %s", err, out)
			}
			if lines := onHost(t, p.info.Source); lines != "" {
				t.Errorf("the host's mount table: %s", lines)
			}
			// Mounts of other sources pass through.
			plain := t.TempDir()
			if out, err := start(true, plain, "echo x > /data/x"); err != nil {
				t.Errorf("%v %s", err, out)
			}
			if _, err := os.Stat(plain + "/x"); err != nil {
				t.Error(err)
			}
			// Without crustd nothing can be resolved, so nothing is given.
			s.Kill()
			if out, err := start(true, p.target, write); err == nil {
				t.Errorf("without crustd: %s", out)
			}
			s.Start()
			s.deregister(p)
			s.nodeUnpublish(p)
			s.Delete(v)
		})
	}
}
